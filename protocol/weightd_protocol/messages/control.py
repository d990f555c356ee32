"""Queries about the server and its models, and operations that change them."""

from __future__ import annotations

from dataclasses import field
from typing import Optional, Tuple

from weightd_protocol import limits
from weightd_protocol.frozen import dataclass
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.schema import boolean, integer, list_of, one_of, record, text

_COUNT = integer(0, limits.MAX_COUNT)


@dataclass(frozen=True)
class ServerReady:
    """client → daemon: ask whether every model is ready."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    tenant: Optional[str] = field(default=None, metadata=text(limits.MAX_NAME_BYTES))
    """Tenant on whose behalf a gateway sends the request (`acts_for`); None for the sender's tenant."""


@dataclass(frozen=True)
class ModelReady:
    """client → daemon: ask whether a model is ready."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    tenant: Optional[str] = field(default=None, metadata=text(limits.MAX_NAME_BYTES))
    """Tenant on whose behalf a gateway sends the request (`acts_for`); None for the sender's tenant."""


@dataclass(frozen=True)
class ReadyResponse:
    """daemon → client: whether a worker of the model, or of each model, has responded within the watchdog's period.

    `reason` explains why the model is not ready; it is "" otherwise. The truth value of the message is `ready`.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    ready: bool = field(metadata=boolean())
    reason: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))

    def __bool__(self) -> bool:
        return self.ready


@dataclass(frozen=True)
class ServerMetadata:
    """client → daemon: ask for the name, version and models of the server."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    tenant: Optional[str] = field(default=None, metadata=text(limits.MAX_NAME_BYTES))
    """Tenant on whose behalf a gateway sends the request (`acts_for`); None for the sender's tenant."""


@dataclass(frozen=True)
class ServerMetadataResponse:
    """daemon → client: name and version of the server, its models, and its extensions of protocol version 2.

    Clients must not use an extension that `extensions` does not name: the server rejects unknown fields and messages.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    version: str = field(metadata=text(limits.MAX_NAME_BYTES))
    models: Tuple[str, ...] = field(metadata=list_of(text(limits.MAX_NAME_BYTES), limits.MAX_MODELS))
    extensions: Tuple[str, ...] = field(metadata=list_of(text(limits.MAX_NAME_BYTES), limits.MAX_EXTENSIONS))


@dataclass(frozen=True)
class ModelMetadata:
    """client → daemon: ask for the signature of a model."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    tenant: Optional[str] = field(default=None, metadata=text(limits.MAX_NAME_BYTES))
    """Tenant on whose behalf a gateway sends the request (`acts_for`); None for the sender's tenant."""


@dataclass(frozen=True)
class ModelMetadataResponse:
    """daemon → client: the model's inputs and outputs. `platform` is its engine.

    `exact` is present if requests may share a predict or run in parts. It tells whether a test has shown that this
    changes no bit of an output. `example` has a shape for each input, in their order, with which the model is known to
    run.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    platform: str = field(metadata=text(limits.MAX_NAME_BYTES))
    inputs: Tuple[TensorSignature, ...] = field(metadata=list_of(record(TensorSignature), limits.MAX_TENSORS))
    outputs: Tuple[TensorSignature, ...] = field(metadata=list_of(record(TensorSignature), limits.MAX_TENSORS))
    exact: Optional[bool] = field(default=None, metadata=boolean())
    example: Optional[Tuple[Tuple[int, ...], ...]] = field(
        default=None, metadata=list_of(list_of(integer(0, limits.MAX_DIM), limits.MAX_RANK), limits.MAX_TENSORS)
    )


@dataclass(frozen=True)
class Update:
    """client → daemon: load another model file or other weights beside the serving version, and switch to it.

    Paths are on the daemon's host. An empty `path` keeps the model file; an empty `weights` keeps the weights in the
    model file. With `rollback`, the daemon returns to the version before the last update, and both paths must be empty.
    The daemon's user, root, and tenants that may `operate` may send this. The user of such a tenant must be able to
    read every file, unless the file is in one of the `model_dirs` of the tenant.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    path: str = field(default="", metadata=text(limits.MAX_PATH_BYTES, empty=True))
    weights: str = field(default="", metadata=text(limits.MAX_PATH_BYTES, empty=True))
    rollback: bool = field(default=False, metadata=boolean())


@dataclass(frozen=True)
class UpdateResponse:
    """daemon → client: the generations with these numbers now serve the model, one on each device.

    They serve `path`, with `weights` loaded over its weights unless "". `configured_path` is the file in the
    configuration. An update does not change the configuration, so a daemon that has to load the model again loads that
    file.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    generations: Tuple[int, ...] = field(metadata=list_of(_COUNT, limits.MAX_GENERATIONS))
    path: str = field(metadata=text(limits.MAX_PATH_BYTES))
    weights: str = field(metadata=text(limits.MAX_PATH_BYTES, empty=True))
    configured_path: str = field(metadata=text(limits.MAX_PATH_BYTES))


LOAD, RETRY, RESTART = "load", "retry", "restart"


@dataclass(frozen=True)
class Load:
    """client → daemon: load a model that is not loaded.

    With the action "load", a model that is loaded already stays as it is. "retry" loads a model that has failed.
    "restart" loads a model from its files again beside the serving version, which it then replaces. With `wait` the
    response is sent once the model serves or has failed, otherwise at once. The daemon's user, root, and tenants that
    may `load` or `operate` may send this; "restart" requires `operate`.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    action: str = field(default=LOAD, metadata=one_of((LOAD, RETRY, RESTART)))
    wait: bool = field(default=False, metadata=boolean())
    tenant: Optional[str] = field(default=None, metadata=text(limits.MAX_NAME_BYTES))
    """Tenant on whose behalf a gateway sends the request (`acts_for`); None for the sender's tenant."""


@dataclass(frozen=True)
class Unload:
    """client → daemon: refuse further requests of a model, finish the accepted ones, and unload the model.

    With `wait` the response is sent once no process of the model is left, otherwise at once. A model that loads on
    demand is loaded again by its next request. The permissions of `Load` apply.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    wait: bool = field(default=False, metadata=boolean())
    tenant: Optional[str] = field(default=None, metadata=text(limits.MAX_NAME_BYTES))
    """Tenant on whose behalf a gateway sends the request (`acts_for`); None for the sender's tenant."""


@dataclass(frozen=True)
class LoadResponse:
    """daemon → client: the answer to `Load` and `Unload`; `state` is the present state of the model."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    state: str = field(metadata=text(limits.MAX_NAME_BYTES))


@dataclass(frozen=True)
class Reload:
    """client → daemon: read the configuration file again and apply it; with `dry_run`, only report the changes.

    The daemon's user, root, and tenants that may `operate` every model may send this.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    dry_run: bool = field(default=False, metadata=boolean())


@dataclass(frozen=True)
class ReloadResponse:
    """daemon → client: the configuration file is valid and, unless it was a dry run, in force.

    `added` models load, `changed` models switch to the new configuration, and `removed` models drain. `retried` models
    had failed and are loaded again unchanged.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    added: Tuple[str, ...] = field(metadata=list_of(text(limits.MAX_MODEL_NAME_BYTES), limits.MAX_MODELS))
    changed: Tuple[str, ...] = field(metadata=list_of(text(limits.MAX_MODEL_NAME_BYTES), limits.MAX_MODELS))
    removed: Tuple[str, ...] = field(metadata=list_of(text(limits.MAX_MODEL_NAME_BYTES), limits.MAX_MODELS))
    retried: Tuple[str, ...] = field(default=(), metadata=list_of(text(limits.MAX_MODEL_NAME_BYTES), limits.MAX_MODELS))
