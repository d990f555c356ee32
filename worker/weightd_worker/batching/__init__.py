"""Several requests in one predict: their rows put together, and those of the answer given back to each.

May import `selftest` and `engines`; no library, and no message is sent from here.
"""
