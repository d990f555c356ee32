"""The version of weightd. Daemon and worker must be of one version: they say theirs in HELLO."""

VERSION = "0.1.0"
