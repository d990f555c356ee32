"""Converts the daemon's responses to responses of the Open Inference Protocol with Triton's extensions.

The functions return plain values with the field names of the JSON form. HTTP sends the values as JSON. gRPC uses the
same names and builds messages from the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from weightd_protocol.errors import InvalidArgument, NotFound, PermissionDenied
from weightd_protocol.messages.control import ModelMetadataResponse, ServerMetadataResponse
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.metrics import Histogram, MetricsResponse, ModelMetrics
from weightd_protocol.model_names import ONLY_VERSION, join_version, split_version
from weightd_protocol.schema import label

_EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
)
_SHARED_MEMORY = "system_shared_memory"

# States in the repository index of models that are not ready, by weightd's state of the model. Models in any other
# state of weightd are reported as LOADING.
_INDEX_STATES: Mapping[str, str] = {
    "failed": "UNAVAILABLE",
    "gone": "UNAVAILABLE",
    "unloaded": "UNAVAILABLE",
    "draining": "UNLOADING",
}

# Parameters of Triton's load and unload requests that weightd accepts without effect: it unloads each model alone.
_IGNORED_LOAD_PARAMETERS = frozenset({"unload_dependents"})

# Triton's names of engines, by weightd's names. Tools only use them to choose icons.
_BACKENDS: Mapping[str, str] = {"onnxruntime": "onnxruntime"}
_PLATFORMS: Mapping[str, str] = {"onnxruntime": "onnxruntime_onnx"}

View = dict[str, Any]


def server_metadata(answer: ServerMetadataResponse, *, shared_memory: bool) -> View:
    """Return the metadata of the server."""
    extensions = [*_EXTENSIONS, _SHARED_MEMORY] if shared_memory else [*_EXTENSIONS]
    return {"name": answer.name, "version": answer.version, "extensions": extensions}


def model_metadata(answer: ModelMetadataResponse, names: Iterable[str]) -> View:
    """Return the metadata of a model; `names` are the daemon's names of all models and versions."""
    model = model_of(answer.name)
    versions = [version for each in names for name, version in [split_version(each)] if name == model and version]
    return {
        "name": model,
        "versions": versions or [ONLY_VERSION],
        "platform": _PLATFORMS.get(answer.platform, answer.platform),
        "inputs": [_tensor_view(each) for each in answer.inputs],
        "outputs": [_tensor_view(each) for each in answer.outputs],
    }


def model_config(answer: ModelMetadataResponse) -> View:
    """Return the configuration that Triton would report for a model.

    `max_batch_size` is always 0, which means that shapes contain all dimensions, the first one included. The daemon may
    batch requests nevertheless, but clients need not do anything for this.
    """
    config: View = {
        "name": model_of(answer.name),
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
    """Return the statistics of one model with all its versions, of one version, or of all models with "".

    The daemon measures the total, queue and compute time of requests. Failed requests are only counted. The daemon does
    not report the time of the last request and batch sizes, so these fields are 0 or empty.

    Raises:
        NotFound: no such model exists.
    """
    selected = [each for each in metrics.models if model in ("", each.name, model_of(each.name), _full_name(each.name))]
    if model and not selected:
        raise NotFound(f"no model {model!r}; there are: {', '.join(each.name for each in metrics.models) or 'none'}")
    return {"model_stats": [_statistics_view(each, _count_failures(metrics, each.name)) for each in selected]}


def repository_index(metrics: MetricsResponse, *, only_ready: bool = False) -> list[View]:
    """Return the repository index, which lists all models or, with `only_ready`, the ready ones."""
    return [
        {
            "name": model_of(each.name),
            "version": version_of(each.name),
            "state": state_of(each),
            "reason": "" if each.ready else each.state,
        }
        for each in metrics.models
        if each.ready or not only_ready
    ]


def check_model_control(*, is_allowed: bool) -> None:
    """Raise `PermissionDenied` unless callers may load and unload models."""
    if not is_allowed:
        raise PermissionDenied("this gateway loads and unloads no models: model_control in its configuration is off")


def check_load_parameters(names: Iterable[str]) -> None:
    """Raise `InvalidArgument` if a load or unload request has a parameter that weightd does not support."""
    unsupported = sorted(name for name in names if name not in _IGNORED_LOAD_PARAMETERS)
    if unsupported:
        raise InvalidArgument(
            f"parameters: unsupported: {', '.join(map(label, unsupported))}; the model's files and settings come from"
            " the daemon's configuration"
        )


def state_of(model: ModelMetrics) -> str:
    """Return the repository index state of a model."""
    return "READY" if model.ready else _INDEX_STATES.get(model.state, "LOADING")


def model_of(name: str) -> str:
    """Return the model's name from the daemon's name of a model or version, such as "resnet" from "resnet@2"."""
    return split_version(name)[0]


def version_of(name: str) -> str:
    """Return the version from the daemon's name of a model or version; `ONLY_VERSION` if the name has none."""
    return split_version(name)[1] or ONLY_VERSION


def _full_name(name: str) -> str:
    return join_version(model_of(name), version_of(name))


def _tensor_view(signature: TensorSignature) -> View:
    return {"name": signature.name, "datatype": signature.datatype, "shape": _shape(signature)}


def _config_tensor_view(signature: TensorSignature) -> View:
    return {"name": signature.name, "data_type": f"TYPE_{signature.datatype}", "dims": _shape(signature)}


def _shape(signature: TensorSignature) -> list[int]:
    # The protocol cannot express "any rank"; one dimension of any size comes closest.
    return [-1] if signature.shape is None else [*signature.shape]


def _statistics_view(model: ModelMetrics, failures: int) -> View:
    requests = _duration_view(model.request_seconds)
    nothing = {"count": requests["count"], "ns": 0}
    return {
        "name": model_of(model.name),
        "version": version_of(model.name),
        "last_inference": 0,
        # In Triton, `inference_count` is the number of rows. Here it is the number of requests for models whose rows
        # the daemon does not know.
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
