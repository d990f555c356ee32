"""What of PyTriton 0.7 the benchmark uses."""
