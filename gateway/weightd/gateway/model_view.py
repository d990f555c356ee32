"""The daemon's answers, as the Open Inference Protocol and its extensions by Triton have them.

Plain values under the names that these have in JSON; gRPC has the same names, and makes messages of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from weightd.protocol.errors import NotFound
from weightd.protocol.messages.control import ModelMetadataResponse, ServerMetadataResponse
from weightd.protocol.messages.data import TensorSignature
from weightd.protocol.messages.status import ModelStatus, StatusResponse

VERSION = "1"
"""Of every model: there is one at a time, and an update takes its place."""

_EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
)
_SHARED_MEMORY = "system_shared_memory"

# Of a state of a model: what a repository index calls it. Any other is on its way.
_READY, _LOADING, _UNAVAILABLE = "READY", "LOADING", "UNAVAILABLE"
_STATES: Mapping[str, str] = {"serving": _READY, "failed": _UNAVAILABLE, "gone": _UNAVAILABLE, "draining": "UNLOADING"}

# Triton's word for the library that runs a model, by weightd's: tools choose icons by it, and ask for nothing.
_BACKENDS: Mapping[str, str] = {"onnxruntime": "onnxruntime"}
_PLATFORMS: Mapping[str, str] = {"onnxruntime": "onnxruntime_onnx"}

View = dict[str, Any]


def server_metadata(answer: ServerMetadataResponse, *, shared_memory: bool) -> View:
    """Return the metadata of the server."""
    extensions = [*_EXTENSIONS, _SHARED_MEMORY] if shared_memory else [*_EXTENSIONS]
    return {"name": answer.name, "version": answer.version, "extensions": extensions}


def model_metadata(answer: ModelMetadataResponse) -> View:
    """Return the metadata of a model."""
    return {
        "name": answer.name,
        "versions": [VERSION],
        "platform": _PLATFORMS.get(answer.platform, answer.platform),
        "inputs": [_tensor(each) for each in answer.inputs],
        "outputs": [_tensor(each) for each in answer.outputs],
    }


def model_config(answer: ModelMetadataResponse) -> View:
    """Return what Triton would have as the configuration of a model.

    `max_batch_size` is 0: shapes are those of the metadata, the first dimension among them, whether or not requests
    share a predict. A client has nothing to do for that.
    """
    config: View = {
        "name": answer.name,
        "platform": _PLATFORMS.get(answer.platform, answer.platform),
        "backend": _BACKENDS.get(answer.platform, answer.platform),
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [_config_tensor(each) for each in answer.inputs],
        "output": [_config_tensor(each) for each in answer.outputs],
        "model_transaction_policy": {"decoupled": False},
    }
    return config


def statistics(status: StatusResponse, model: str = "") -> View:
    """Return the statistics of a model, or of all.

    Raises:
        NotFound: there is no such model.
    """
    return {"model_stats": [_statistics(each) for each in _chosen(status, model)]}


def repository_index(status: StatusResponse, *, ready: bool = False) -> list[View]:
    """Return the models that there are; `ready`: those that can answer."""
    index = [
        {"name": each.name, "version": VERSION, "state": state_of(each), "reason": each.note} for each in status.models
    ]
    return [each for each in index if each["state"] == _READY] if ready else index


def state_of(model: ModelStatus) -> str:
    """Return the state of a model in the words of a repository index."""
    return _STATES.get(model.state, _LOADING)


def _chosen(status: StatusResponse, model: str) -> Iterable[ModelStatus]:
    chosen = [each for each in status.models if model in ("", each.name)]
    if model and not chosen:
        raise NotFound(f"no model {model!r}; there are: {', '.join(each.name for each in status.models) or 'none'}")
    return chosen


def _tensor(signature: TensorSignature) -> View:
    return {"name": signature.name, "datatype": signature.datatype, "shape": _shape(signature)}


def _config_tensor(signature: TensorSignature) -> View:
    return {"name": signature.name, "data_type": f"TYPE_{signature.datatype}", "dims": _shape(signature)}


def _shape(signature: TensorSignature) -> list[int]:
    # There is no word for any rank: one dimension of any size comes closest.
    return [-1] if signature.shape is None else [*signature.shape]


def _statistics(model: ModelStatus) -> View:
    nothing = {"count": 0, "ns": 0}
    executions = model.served if model.executions is None else model.executions.count
    return {
        "name": model.name,
        "version": VERSION,
        "last_inference": 0,
        "inference_count": model.served,
        "execution_count": executions,
        "inference_stats": {
            "success": {"count": model.served, "ns": 0},
            "fail": {"count": model.failed, "ns": 0},
            "queue": {"count": model.served, "ns": 0},
            "compute_input": {"count": model.served, "ns": 0},
            "compute_infer": {"count": model.served, "ns": 0},
            "compute_output": {"count": model.served, "ns": 0},
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "batch_stats": [],
    }
