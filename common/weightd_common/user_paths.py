"""Paths of this host, as users write them."""

from __future__ import annotations

from typing import Any

from weightd_protocol.schema import FieldError, FieldType, Metadata, short_repr, text


def user_path(max_bytes: int, *, empty: bool = False) -> Metadata:
    """A path, as text of at most `max_bytes` bytes; nobody expands a ~, which would mean another home to a service."""
    kind = text(max_bytes, empty=empty)["field_type"]

    def check(value: Any) -> str:
        checked: str = kind.check(value)
        if "\0" in checked:
            raise FieldError(f"expected text without a NUL character, got {short_repr(checked)}")
        if checked == "~" or (checked.startswith("~") and "/" in checked):
            raise FieldError(f"expected a path without ~, which is not expanded, got {short_repr(checked)}")
        return checked

    return {"field_type": FieldType(check, check, check, kind.description)}
