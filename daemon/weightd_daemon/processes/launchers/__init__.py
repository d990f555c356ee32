"""How children are started: by this process, or by a keeper that outlives it."""
