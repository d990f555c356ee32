"""What the table of a model of a group comes to: whose process it has."""

from __future__ import annotations

from dataclasses import dataclass, field

from weightd_protocol import limits
from weightd_protocol.schema import list_of, text

_NAME = text(limits.MAX_NAME_BYTES)


@dataclass(frozen=True)
class Membership:
    """The group that a model is of; equal if nothing has changed of any of its models.

    Attributes:
        name: of the group.
        share: what its models have in common.
        models: their names, in the order in which the process has them.
        digest: of all that is configured of them.
    """

    name: str = field(metadata=_NAME)
    share: str = field(metadata=_NAME)
    models: tuple[str, ...] = field(metadata=list_of(_NAME, limits.MAX_MODELS))
    digest: str = field(metadata=_NAME)
