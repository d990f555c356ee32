"""Self-test of a model: inputs with known answers, which show that a process computes with the right weights.

The package may import `engines`, but no engine's library. It sends no messages.
"""
