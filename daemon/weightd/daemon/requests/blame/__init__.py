"""Whose fault it is when workers die or hang: contents and clients that are kept from the next worker."""
