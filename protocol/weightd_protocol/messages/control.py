"""Messages that query the server and its models, and messages that change them."""

from __future__ import annotations

from dataclasses import field
from typing import Optional, Tuple

from weightd_protocol import limits
from weightd_protocol.frozen import dataclass
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.status import VersionShare
from weightd_protocol.schema import boolean, integer, list_of, number, one_of, record, text

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
    """daemon → client: whether a model, or every model, is ready.

    A model is ready if one of its workers has responded within the watchdog's period. `reason` says why the model is
    not ready; it is "" if it is ready. The truth value of the message is `ready`.
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
    """daemon → client: name and version of the server, the names of its models, and its protocol extensions.

    Clients must not use an extension of protocol version 2 that is missing in `extensions`, because the server rejects
    unknown fields and messages.
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
    """daemon → client: the inputs and outputs of the model. `platform` is the model's engine.

    `exact` is present if the daemon may batch requests of this model or split them. It is true if a test has shown that
    batching and splitting change no bit of an output. `example` is a list of shapes, one for each of `inputs`, with
    which the model has been run.
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

    Paths are on the daemon's host. An empty `path` keeps the current model file. An empty `weights` uses the weights in
    the model file. With `rollback`, the daemon returns to the version before the last update; `path` and `weights` must
    then be empty. The daemon accepts this message from its own user, from root, and from tenants with the right
    `operate`. The user of such a tenant must be able to read each file, unless it is in one of the tenant's
    `model_dirs`.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    path: str = field(default="", metadata=text(limits.MAX_PATH_BYTES, empty=True))
    weights: str = field(default="", metadata=text(limits.MAX_PATH_BYTES, empty=True))
    rollback: bool = field(default=False, metadata=boolean())


@dataclass(frozen=True)
class UpdateResponse:
    """daemon → client: the update has succeeded; the new version serves the model.

    `generations` has the number of the serving generation on each device. `path` is the served model file, and
    `weights` the file whose arrays replace weights of the model; "" for none. `configured_path` is the model file in
    the configuration, which an update does not change: if the daemon has to load the model again, it loads this file.
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

    The action "load" has no effect on a model that is already loaded. "retry" loads a model that has failed. "restart"
    loads a model from its files again; the current version serves until the new one replaces it. With `wait`, the
    daemon replies when the model serves or has failed, otherwise at once. The daemon accepts this message from its own
    user, from root, and from tenants with the right `load` or `operate`; "restart" requires `operate`.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    action: str = field(default=LOAD, metadata=one_of((LOAD, RETRY, RESTART)))
    wait: bool = field(default=False, metadata=boolean())
    tenant: Optional[str] = field(default=None, metadata=text(limits.MAX_NAME_BYTES))
    """Tenant on whose behalf a gateway sends the request (`acts_for`); None for the sender's tenant."""


@dataclass(frozen=True)
class Unload:
    """client → daemon: refuse new requests of a model, finish the accepted requests, and unload the model.

    With `wait`, the daemon replies when no process of the model is left, otherwise at once. If the model loads on
    demand, its next request loads it again. The sender needs the same rights as for `Load`.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    wait: bool = field(default=False, metadata=boolean())
    tenant: Optional[str] = field(default=None, metadata=text(limits.MAX_NAME_BYTES))
    """Tenant on whose behalf a gateway sends the request (`acts_for`); None for the sender's tenant."""


@dataclass(frozen=True)
class LoadResponse:
    """daemon → client: the reply to `Load` and `Unload`. `state` is the current state of the model."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    state: str = field(metadata=text(limits.MAX_NAME_BYTES))


SET_SHARE, PROMOTE, ABORT = "set", "promote", "abort"


@dataclass(frozen=True)
class Rollout:
    """client → daemon: change which versions of a model answer the requests that name no version.

    "set" sends `percent` of these requests to `version`; the other versions keep their proportions. "promote" sends all
    of them to `version`. "abort" returns to the shares in the configuration; `version` must be 0. Requests that name a
    version are not affected. The daemon accepts this message from its own user, from root, and from tenants with the
    right `operate`.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    action: str = field(metadata=one_of((SET_SHARE, PROMOTE, ABORT)))
    version: int = field(default=0, metadata=_COUNT)
    percent: float = field(default=0.0, metadata=number(100.0))


@dataclass(frozen=True)
class RolloutResponse:
    """daemon → client: the versions of the model and the percentage of the requests that each of them gets now."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    shares: Tuple[VersionShare, ...] = field(metadata=list_of(record(VersionShare), limits.MAX_MODEL_VERSIONS))


@dataclass(frozen=True)
class Reload:
    """client → daemon: read the configuration file again and apply it. With `dry_run`, only report the changes.

    The daemon accepts this message from its own user, from root, and from tenants that may `operate` every model.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    dry_run: bool = field(default=False, metadata=boolean())


@dataclass(frozen=True)
class ReloadResponse:
    """daemon → client: the configuration file is valid. Unless `dry_run` was requested, the daemon now uses it.

    `added` lists models that now load, `changed` lists models that switch to their new configuration, and `removed`
    lists models that end when their accepted requests have ended. `retried` lists models whose configuration is
    unchanged and that load again because they had failed.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    added: Tuple[str, ...] = field(metadata=list_of(text(limits.MAX_MODEL_NAME_BYTES), limits.MAX_MODELS))
    changed: Tuple[str, ...] = field(metadata=list_of(text(limits.MAX_MODEL_NAME_BYTES), limits.MAX_MODELS))
    removed: Tuple[str, ...] = field(metadata=list_of(text(limits.MAX_MODEL_NAME_BYTES), limits.MAX_MODELS))
    retried: Tuple[str, ...] = field(default=(), metadata=list_of(text(limits.MAX_MODEL_NAME_BYTES), limits.MAX_MODELS))
