"""The version of weightd, and what it understands beyond version 2 of the protocol as that began."""

from typing import Tuple

# Daemon and worker must be of one version: they say theirs in HELLO.
VERSION = "0.1.0"

EXTENSIONS: Tuple[str, ...] = ()
