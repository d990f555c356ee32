"""weightd on Ray Serve: one daemon on each node, while Serve handles everything between nodes (docs/ray.md).

Ray is imported only when it is needed, because the daemon supervisor is part of this package and must stay small.
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
        ArgumentError: arguments are invalid; the text names each one and what was expected.
    """
    from weightd_ray import application  # noqa: PLC0415 - the module imports Ray

    return application.build(args)


def publish(path: str | os.PathLike[str]) -> str:
    """Publish the files of a model in Ray's object store, from which replicas fetch them; return their "sha256:…".

    The files stay there after this process has exited, until they are unpublished or Ray is stopped.

    Raises:
        ModelFileError: the files cannot be read.
    """
    from weightd_ray import model_store  # noqa: PLC0415 - the module imports Ray

    return model_store.publish(path)


def unpublish(model: str) -> None:
    """Remove a published model from the object store; copies that replicas have fetched remain.

    Raises:
        NotFound: no model of this name is published.
    """
    from weightd_ray import model_store  # noqa: PLC0415 - the module imports Ray

    model_store.unpublish(model)
