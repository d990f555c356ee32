"""The gateway's own configuration: a TOML file whose every mistake is told by its key."""
