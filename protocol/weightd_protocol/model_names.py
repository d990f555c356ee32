"""Names of the versions of a model: version 2 of the model `resnet` is `resnet@2`."""

from __future__ import annotations

from typing import Tuple

SEPARATOR = "@"

ONLY_VERSION = "1"
"""Version of a model whose configuration has no `versions`."""


def join_version(model: str, version: str) -> str:
    """Return the name of a version of a model; with "" as the version, the name of the model."""
    return f"{model}{SEPARATOR}{version}" if version else model


def split_version(name: str) -> Tuple[str, str]:
    """Return the model and the version in a name; the version is "" if the name has none."""
    model, _, version = name.partition(SEPARATOR)
    return model, version
