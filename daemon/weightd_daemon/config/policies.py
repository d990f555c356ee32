"""The words of the configuration by which others decide."""

from __future__ import annotations

import enum


class ReplacementPolicy(enum.Enum):
    """How a generation that has lost workers for good is replaced."""

    AUTO = "auto"  # beside the old one if there is room, else in its place
    OVERLAP = "overlap"  # beside the old one; without room it goes on with what is left
    REPLACE = "replace"  # in its place: it leaves first, and requests wait
