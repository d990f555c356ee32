"""What `weightctl top` and the status page show: made from what the daemon counts and what its status tells."""
