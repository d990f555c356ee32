"""Names that users choose for what they configure: they become part of file names and of process names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from weightd_protocol import limits
from weightd_protocol.schema import FieldError

_NAME_PATTERN = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{limits.MAX_MODEL_NAME_BYTES - 1}}}")


def check_name(kind: str, name: str) -> Iterator[FieldError]:
    """Say so if this is no name for a `kind`."""
    if not _NAME_PATTERN.fullmatch(name):
        yield FieldError(
            f"expected a {kind} name of 1 to {limits.MAX_MODEL_NAME_BYTES} ASCII letters, digits, '_', '.' and '-', "
            "the last two not first"
        )
