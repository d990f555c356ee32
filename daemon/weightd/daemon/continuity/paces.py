"""How long models took to load, in a file: the next daemon on the same socket knows how far they are.

A map in JSON, from the name of each. It is written when one has loaded, where there is a service manager: elsewhere a
daemon that has ended leaves nothing. What is no such file is as good as none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from weightd.daemon.models.pace import Pace
from weightd.protocol.schema import decode, plain

_log = logging.getLogger("weightd")

# Several times as much as is ever written.
_MOST_BYTES = 256 * 1024


class PacesError(Exception):
    """What is in the file is not what one writes there."""


def write(path: Path, paces: Mapping[str, Pace]) -> None:
    """Replace what is at `path`. If that cannot be, the next daemon knows less: nobody has to be told."""
    new = path.with_name(f"{path.name}.new")
    with contextlib.suppress(OSError):
        # What an earlier daemon has left there may be anything.
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({name: plain(pace) for name, pace in paces.items()}, file)
        new.replace(path)


def read(path: Path) -> dict[str, Pace]:
    """Return what was written at `path`; nothing where there is nothing of use."""
    try:
        return _read(path)
    except FileNotFoundError:
        return {}
    except (OSError, PacesError) as error:
        _log.warning("how long models took to load is forgotten: %s: %s", path, getattr(error, "strerror", error))
        return {}


def _read(path: Path) -> dict[str, Pace]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            raise PacesError(f"expected a file of at most {_MOST_BYTES} bytes")
        content = file.read(_MOST_BYTES)
    try:
        values: Any = json.loads(content)
        if not isinstance(values, dict):
            raise PacesError("expected a map")
        return {name: decode(Pace, value) for name, value in cast("dict[str, Any]", values).items()}
    except (ValueError, RecursionError) as error:
        raise PacesError(str(error)) from None
