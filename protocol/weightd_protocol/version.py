"""The version of weightd, and the extensions of protocol version 2 that its daemon supports."""

from typing import Tuple

# Daemon and workers must have the same version. A worker sends its version in the message `Hello`.
VERSION = "0.1.0"

EXTENSIONS: Tuple[str, ...] = ()
