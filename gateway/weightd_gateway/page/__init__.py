"""The status page: its files and its data. The server of the page decides who may access it."""
