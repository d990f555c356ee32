"""Processes: holders, workers and those that take snapshots, started, heard, ordered and reaped."""
