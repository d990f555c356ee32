"""weightd on Ray Serve: a daemon on each node, and Serve for what is between nodes (docs/cluster.md).

Nothing of Ray is imported before it is asked for: the guard of a daemon is of this package, too, and stays small.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["app", "publish", "unpublish"]


# Annotated with a class that is no class to be checked against: Serve looks at that.
def app(args: Mapping[str, Any]) -> Application:
    """Return the application of one model: for `serve run weightd_ray:app model=…`, and for a YAML of Serve's.

    Args:
        args: see `weightd_ray.options.Arguments`, and the keys of [models.NAME] of the daemon's configuration.

    Raises:
        ArgumentError: they are not usable; the text names each and says what was expected.
    """
    from weightd_ray import application  # noqa: PLC0415 - it needs Ray

    return application.build(args)


def publish(path: str | os.PathLike[str]) -> str:
    """Put the files of a model into Ray's object store, from which replicas take them; return their "sha256:…".

    They stay there, whoever ends, until they are unpublished, or Ray is stopped.

    Raises:
        ModelFileError: they cannot be read.
    """
    from weightd_ray import model_store  # noqa: PLC0415 - it needs Ray

    return model_store.publish(path)


def unpublish(model: str) -> None:
    """Take a model out of it again: what replicas have by then, they keep.

    Raises:
        NotFound: nothing of this name is published.
    """
    from weightd_ray import model_store  # noqa: PLC0415 - it needs Ray

    model_store.unpublish(model)
