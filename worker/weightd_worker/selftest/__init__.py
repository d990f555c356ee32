"""Self-test of a model: inputs with known answers, which show that a process computes with the right weights.

The package may import `engines`, but not the library of an engine. It sends no messages to the daemon itself.
"""
