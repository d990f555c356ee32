"""weightd on Ray Serve: one daemon on each node, while Serve distributes requests among the nodes (docs/ray.md).

Functions import Ray only when they need it, because the daemon supervisor is part of this package and its process must
stay small.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["app", "publish", "unpublish"]


# The return type is imported only for type checkers, because Serve inspects the annotations at run time.
def app(args: Mapping[str, Any]) -> Application:
    """Return the application of one model, for `serve run weightd_ray:app model=…` or a Serve configuration in YAML.

    Args:
        args: the fields of `weightd_ray.options.Arguments`, and keys of [models.NAME] of the daemon's configuration.

    Raises:
        ArgumentError: arguments are invalid; the text names each invalid argument and the expected value.
    """
    from weightd_ray import application  # noqa: PLC0415 - the module imports Ray

    return application.build(args)


def publish(path: str | os.PathLike[str]) -> str:
    """Publish the files of a model in Ray's object store; return the name of the model there, "sha256:…".

    Replicas fetch the files by this name. The files stay in the object store after this process has exited, until they
    are unpublished or Ray is stopped.

    Raises:
        ModelFileError: the files cannot be read.
    """
    from weightd_ray import model_store  # noqa: PLC0415 - the module imports Ray

    return model_store.publish(path)


def unpublish(model: str) -> None:
    """Remove a published model from the object store; copies that replicas have fetched remain on their hosts.

    Raises:
        NotFound: no model of this name is published.
    """
    from weightd_ray import model_store  # noqa: PLC0415 - the module imports Ray

    model_store.unpublish(model)
