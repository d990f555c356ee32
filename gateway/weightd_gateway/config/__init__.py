"""The gateway's own configuration: a TOML file. Each error names the key that caused it."""
