"""Names that users choose for what they configure: they become part of file names and of process names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from weightd.protocol import limits
from weightd.protocol.schema import FieldError

_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{limits.MAX_MODEL_NAME_BYTES - 1}}}")


def of_name(what: str, name: str) -> Iterator[FieldError]:
    """Say so if this is no name for a `what`."""
    if not _NAME.fullmatch(name):
        yield FieldError(
            f"expected a {what} name of 1 to {limits.MAX_MODEL_NAME_BYTES} ASCII letters, digits, '_', '.' and '-', "
            "the last two not first"
        )
