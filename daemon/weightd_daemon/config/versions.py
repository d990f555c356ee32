"""The keys `versions` and `traffic` of a model of which several versions are served side by side."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weightd_common.toml_schema import user_path
from weightd_protocol import limits
from weightd_protocol.schema import FieldError, FieldType, Metadata, integer, label, mapping

VersionFiles = tuple[tuple[int, str], ...]
"""The model file of each version, by ascending number of the version."""

TrafficWeights = tuple[tuple[int, int], ...]
"""The weight of each version among the requests that name no version, by ascending number of the version."""

_VERSION_PATTERN = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class VersionSetConfig:
    """The versions of a model, each of which is served as the model NAME@VERSION.

    Attributes:
        versions: the numbers of the versions, ascending.
        traffic: the weight of each version among the requests that name no version. If empty, the newest version that
            can serve answers all these requests.
        keep: how many of the newest versions are served; 0: all. An older version is served until a newer one has
            served.
    """

    versions: tuple[int, ...]
    traffic: TrafficWeights = ()
    keep: int = 0


def files_metadata() -> Metadata:
    """Return the metadata of the key `versions`."""
    return _by_version(user_path(limits.MAX_PATH_BYTES), "table of paths by number of the version")


def traffic_metadata() -> Metadata:
    """Return the metadata of the key `traffic`."""
    return _by_version(integer(1, 1_000_000), "table of integers, 1 to 1000000, by number of the version")


def _by_version(item: Metadata, description: str) -> Metadata:
    """Return the type of a table by version. Its value is a tuple of pairs, because configurations are immutable."""
    table = mapping(item, limits.MAX_MODEL_VERSIONS)["field_type"]

    def check(value: Any) -> tuple[tuple[int, Any], ...]:
        checked: Mapping[str, Any] = table.check(value)
        for name in checked:
            if not _VERSION_PATTERN.fullmatch(name):
                expected = "expected the number of a version, 1 to 999999999"
                raise FieldError(f"{expected}, got {name!r}").at(f".{label(name)}")
        return tuple(sorted((int(name), each) for name, each in checked.items()))

    def plain(value: Any) -> Any:
        return table.plain({str(version): each for version, each in value})

    return {"field_type": FieldType(check, check, plain, description, items=table.items)}
