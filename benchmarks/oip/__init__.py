"""Servers of the Open Inference Protocol, each set up as documented, and one client for all of them."""
