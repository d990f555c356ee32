"""Real workers, driven through their own protocol, outside of any daemon. Imports neither facts nor checks."""
