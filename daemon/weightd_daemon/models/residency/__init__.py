"""Decides which models are in memory: budgets, loads on demand, and unloads."""
