"""Processes that are forked, with all that they need in memory: what to do so that nothing but that is inherited."""
