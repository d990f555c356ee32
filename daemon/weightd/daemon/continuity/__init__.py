"""One daemon after another, and the service manager above: what is claimed, handed over, kept and told."""
