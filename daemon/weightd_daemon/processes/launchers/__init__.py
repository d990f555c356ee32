"""How children are started: by this process, or by a shim that outlives it."""
