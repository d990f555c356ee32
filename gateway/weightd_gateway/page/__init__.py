"""The status page: its files, and the numbers that it shows. Who serves them decides who may see these."""
