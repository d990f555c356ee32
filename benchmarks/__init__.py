"""Measurements of weightd against the bare engine, each within one run: `python -m benchmarks NAME`."""
