"""The daemon's answers, as the Open Inference Protocol and its extensions by Triton have them.

Plain values under the names that these have in JSON; gRPC has the same names, and makes messages of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightd_protocol.errors import NotFound
from weightd_protocol.messages.control import ModelMetadataResponse, ServerMetadataResponse
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.metrics import Histogram, MetricsResponse, ModelMetrics

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

# What a repository index calls a model that cannot answer, by its state; any other is on its way.
_INDEX_STATES: Mapping[str, str] = {"failed": "UNAVAILABLE", "gone": "UNAVAILABLE", "draining": "UNLOADING"}

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
        "inputs": [_tensor_view(each) for each in answer.inputs],
        "outputs": [_tensor_view(each) for each in answer.outputs],
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
        "input": [_config_tensor_view(each) for each in answer.inputs],
        "output": [_config_tensor_view(each) for each in answer.outputs],
        "model_transaction_policy": {"decoupled": False},
    }
    return config


def statistics(metrics: MetricsResponse, model: str = "") -> View:
    """Return the statistics of a model, or of all.

    Durations are from the daemon: those of requests, of their waiting for a worker, and of what workers computed. What
    has failed is counted, but not its time. When the last request came, and which batches there were, nobody knows.

    Raises:
        NotFound: there is no such model.
    """
    selected = [each for each in metrics.models if model in ("", each.name)]
    if model and not selected:
        raise NotFound(f"no model {model!r}; there are: {', '.join(each.name for each in metrics.models) or 'none'}")
    return {"model_stats": [_statistics_view(each, _count_failures(metrics, each.name)) for each in selected]}


def repository_index(metrics: MetricsResponse, *, only_ready: bool = False) -> list[View]:
    """Return the models that there are; `only_ready`: those that can answer."""
    return [
        {"name": each.name, "version": VERSION, "state": state_of(each), "reason": "" if each.ready else each.state}
        for each in metrics.models
        if each.ready or not only_ready
    ]


def state_of(model: ModelMetrics) -> str:
    """Return the state of a model in the words of a repository index."""
    return "READY" if model.ready else _INDEX_STATES.get(model.state, "LOADING")


def _tensor_view(signature: TensorSignature) -> View:
    return {"name": signature.name, "datatype": signature.datatype, "shape": _shape(signature)}


def _config_tensor_view(signature: TensorSignature) -> View:
    return {"name": signature.name, "data_type": f"TYPE_{signature.datatype}", "dims": _shape(signature)}


def _shape(signature: TensorSignature) -> list[int]:
    # There is no word for any rank: one dimension of any size comes closest.
    return [-1] if signature.shape is None else [*signature.shape]


def _statistics_view(model: ModelMetrics, failures: int) -> View:
    requests = _duration_view(model.request_seconds)
    nothing = {"count": requests["count"], "ns": 0}
    return {
        "name": model.name,
        "version": VERSION,
        "last_inference": 0,
        # Of rows where they are known, as Triton counts.
        "inference_count": round(model.batch_rows.sum) or requests["count"],
        "execution_count": model.executions,
        "inference_stats": {
            "success": requests,
            "fail": {"count": failures, "ns": 0},
            "queue": _duration_view(model.queue_seconds),
            "compute_input": nothing,
            "compute_infer": _duration_view(model.compute_seconds),
            "compute_output": nothing,
            "cache_hit": {"count": 0, "ns": 0},
            "cache_miss": {"count": 0, "ns": 0},
        },
        "batch_stats": [],
    }


def _duration_view(histogram: Histogram) -> View:
    return {"count": sum(histogram.counts), "ns": round(1e9 * histogram.sum)}


def _count_failures(metrics: MetricsResponse, model: str) -> int:
    accounts = (account for tenant in metrics.tenants for account in tenant.accounts if account.model == model)
    return sum(sum(account.failed.values()) for account in accounts)
