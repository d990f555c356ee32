"""Who asks, and what they may: tenants, and how a peer is known to be one."""
