"""One daemon after another, and the service manager above: what is claimed, handed over, kept and told.

Asks the shim of `processes` and writes down what `models` say of themselves; may import those and what is below them.
"""
