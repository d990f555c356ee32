"""`weightctl bench`: measures throughput and latency of a model."""
