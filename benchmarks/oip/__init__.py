"""Servers of the Open Inference Protocol, each configured as documented, and one client for all of them."""
