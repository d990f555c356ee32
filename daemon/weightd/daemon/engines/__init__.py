"""What the configuration and the command line know of each engine.

No engine is imported; of weightd only `host` may be.
"""
