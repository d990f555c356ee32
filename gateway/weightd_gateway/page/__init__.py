"""The status page: its files and its data. The HTTP server checks who may access the page."""
