"""The version of weightd, and its extensions of protocol version 2."""

from typing import Tuple

# Daemon and worker must have the same version. A worker sends its version in HELLO.
VERSION = "0.1.0"

EXTENSIONS: Tuple[str, ...] = ()
