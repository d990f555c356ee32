"""What the commands share that measure a model: who is asked, with what, and what the daemon has counted meanwhile."""
