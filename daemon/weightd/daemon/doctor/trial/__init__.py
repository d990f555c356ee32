"""Real workers, driven through their own protocol, outside of any daemon."""
