"""What is asked about the server and its models, and what changes them."""

from __future__ import annotations

from dataclasses import field
from typing import Optional, Tuple

from weightd_protocol import limits
from weightd_protocol.frozen import dataclass
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.schema import boolean, integer, list_of, record, text

_COUNT = integer(0, limits.MAX_COUNT)


@dataclass(frozen=True)
class ServerReady:
    """client → daemon: is every model ready?"""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    tenant: Optional[str] = field(default=None, metadata=text(limits.MAX_NAME_BYTES))
    """For whom a gateway asks (`acts_for`); the sender itself for none."""


@dataclass(frozen=True)
class ModelReady:
    """client → daemon: is this model ready?"""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    tenant: Optional[str] = field(default=None, metadata=text(limits.MAX_NAME_BYTES))
    """For whom a gateway asks (`acts_for`); the sender itself for none."""


@dataclass(frozen=True)
class ReadyResponse:
    """daemon → client: whether a worker of the model, or of each model, has answered within the watchdog's period.

    `reason` says why not; "" where it is ready. The message itself is true or false as `ready` is.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    ready: bool = field(metadata=boolean())
    reason: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))

    def __bool__(self) -> bool:
        return self.ready


@dataclass(frozen=True)
class ServerMetadata:
    """client → daemon: who answers here?"""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    tenant: Optional[str] = field(default=None, metadata=text(limits.MAX_NAME_BYTES))
    """For whom a gateway asks (`acts_for`); the sender itself for none."""


@dataclass(frozen=True)
class ServerMetadataResponse:
    """daemon → client: name and version of the server, its models, and what it understands beyond version 2 as it was.

    Nothing is sent to a server that it does not name in `extensions`, for it refuses what it does not know.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    version: str = field(metadata=text(limits.MAX_NAME_BYTES))
    models: Tuple[str, ...] = field(metadata=list_of(text(limits.MAX_NAME_BYTES), limits.MAX_MODELS))
    extensions: Tuple[str, ...] = field(metadata=list_of(text(limits.MAX_NAME_BYTES), limits.MAX_EXTENSIONS))


@dataclass(frozen=True)
class ModelMetadata:
    """client → daemon: what does the model take and give?"""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    tenant: Optional[str] = field(default=None, metadata=text(limits.MAX_NAME_BYTES))
    """For whom a gateway asks (`acts_for`); the sender itself for none."""


@dataclass(frozen=True)
class ModelMetadataResponse:
    """daemon → client: the model's inputs and outputs; `platform` is its engine.

    `exact` is there where requests may share a predict, or run in parts: whether it was tested that no bit of an answer
    changes by that. `example` has a shape for each input, in their order: together they are known to be good.
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
    """client → daemon: load another model, or other weights, beside what serves, and let it take over.

    Paths are the daemon's. `path` is "" to keep the model's file, `weights` is "" to keep the weights that are in it.
    `rollback`: go back to what served before the last update; paths are then "". The daemon's user, root, and tenants
    that may `operate` may send this. The user of such a tenant has to be able to read every file, unless the file lies
    below one of the `model_dirs` of the tenant.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    path: str = field(default="", metadata=text(limits.MAX_PATH_BYTES, empty=True))
    weights: str = field(default="", metadata=text(limits.MAX_PATH_BYTES, empty=True))
    rollback: bool = field(default=False, metadata=boolean())


@dataclass(frozen=True)
class UpdateResponse:
    """daemon → client: the generations with these numbers have taken over, one on each device.

    They serve `path`, with `weights` over those in it or "". `configured_path` is the file that the configuration
    names: an update does not change it, and a daemon that has to load the model anew loads that.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    generations: Tuple[int, ...] = field(metadata=list_of(_COUNT, limits.MAX_GENERATIONS))
    path: str = field(metadata=text(limits.MAX_PATH_BYTES))
    weights: str = field(metadata=text(limits.MAX_PATH_BYTES, empty=True))
    configured_path: str = field(metadata=text(limits.MAX_PATH_BYTES))


@dataclass(frozen=True)
class Reload:
    """client → daemon: read the configuration file again, and serve what it says now.

    The daemon's user, root, and tenants that may `operate` every model may send this.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))


@dataclass(frozen=True)
class ReloadResponse:
    """daemon → client: the file is good and in force; these models load, roll to what it says now, or drain.

    `retried` had failed, and are loaded again as they are.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    added: Tuple[str, ...] = field(metadata=list_of(text(limits.MAX_MODEL_NAME_BYTES), limits.MAX_MODELS))
    changed: Tuple[str, ...] = field(metadata=list_of(text(limits.MAX_MODEL_NAME_BYTES), limits.MAX_MODELS))
    removed: Tuple[str, ...] = field(metadata=list_of(text(limits.MAX_MODEL_NAME_BYTES), limits.MAX_MODELS))
    retried: Tuple[str, ...] = field(default=(), metadata=list_of(text(limits.MAX_MODEL_NAME_BYTES), limits.MAX_MODELS))
