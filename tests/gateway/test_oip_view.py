"""Tests of the conversion of the daemon's answers to the Open Inference Protocol."""

from __future__ import annotations

import dataclasses

import pytest

from weightd_gateway.oip_view import model_config, model_metadata, repository_index, server_metadata, statistics
from weightd_protocol.errors import NotFound
from weightd_protocol.messages.accounts import AccountStatus, TenantStatus
from weightd_protocol.messages.control import ModelMetadataResponse, ServerMetadataResponse
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.metrics import Histogram, MetricsResponse, ModelMetrics, ReloadCounts

METADATA = ModelMetadataResponse(
    "1",
    "digits",
    "onnxruntime",
    (TensorSignature("x", "FP32", (-1, 2)), TensorSignature("any", "FP16", None)),
    (TensorSignature("label", "INT64", ()),),
)


NOTHING = Histogram((), 0.0)


def _model(name: str, state: str, requests: Histogram = NOTHING, rows: Histogram = NOTHING) -> ModelMetrics:
    return ModelMetrics(
        name,
        "onnxruntime",
        state,
        ready=state == "serving",
        generation=1,
        sha256="",
        queued=0,
        running=0,
        processes=(),
        executions=12,
        unexpected_exits=0,
        restarts=0,
        selftest_failures=0,
        batch_mismatches=0,
        quarantined=0,
        request_seconds=requests,
        queue_seconds=NOTHING,
        compute_seconds=NOTHING,
        batch_rows=rows,
    )


def _account(model: str, refused: dict[str, int]) -> AccountStatus:
    return AccountStatus(model, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0, refused)


METRICS = MetricsResponse(
    "1",
    "9.9",
    "running",
    1.0,
    (0.1,),
    (1,),
    (
        _model("digits", "serving", Histogram((15, 5), 2.5), Histogram((0, 12), 40.0)),
        _model("ocr", "building", Histogram((1, 1), 1.0)),
        _model("bad", "failed"),
    ),
    (
        TenantStatus("a", 1.0, (_account("digits", {"max_rows": 1, "INTERNAL": 2}), _account("", {"NOT_FOUND": 7}))),
        TenantStatus("b", 1.0, (_account("digits", {"CANCELLED": 4}),)),
    ),
    0,
    0,
    0,
    ReloadCounts(0, 0),
)


def test_server_metadata() -> None:
    answer = ServerMetadataResponse("1", "weightd", "9.9", ("digits",), ())
    plain = server_metadata(answer, shared_memory=False)
    assert (plain["name"], plain["version"]) == ("weightd", "9.9")
    assert "binary_tensor_data" in plain["extensions"]
    assert "system_shared_memory" not in plain["extensions"]
    assert "system_shared_memory" in server_metadata(answer, shared_memory=True)["extensions"]


def test_model_metadata_has_all_versions() -> None:
    one = dataclasses.replace(METADATA, name="digits@2")
    view = model_metadata(one, ["digits@1", "digits@2", "digits", "other@7"])
    assert (view["name"], view["versions"]) == ("digits", ["1", "2"])


def test_model_metadata() -> None:
    assert model_metadata(METADATA, ["digits"]) == {
        "name": "digits",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [-1, 2]},
            {"name": "any", "datatype": "FP16", "shape": [-1]},
        ],
        "outputs": [{"name": "label", "datatype": "INT64", "shape": []}],
    }


def test_model_config_uses_names_of_metadata() -> None:
    config = model_config(METADATA)
    assert config["max_batch_size"] == 0
    assert config["input"][0] == {"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 2]}
    assert config["output"] == [{"name": "label", "data_type": "TYPE_INT64", "dims": []}]
    assert config["model_transaction_policy"] == {"decoupled": False}
    assert not {"sequence_batching", "ensemble_scheduling"} & {*config}


def test_statistics_of_all_models_or_one() -> None:
    assert [each["name"] for each in statistics(METRICS)["model_stats"]] == ["digits", "ocr", "bad"]
    [digits] = statistics(METRICS, "digits")["model_stats"]
    assert (digits["inference_count"], digits["execution_count"]) == (40, 12)
    assert digits["inference_stats"]["success"] == {"count": 20, "ns": 2_500_000_000}
    assert digits["inference_stats"]["fail"]["count"] == 7
    with pytest.raises(NotFound, match="no model 'cats'; there are: digits, ocr, bad"):
        statistics(METRICS, "cats")


def test_counts_requests_if_rows_are_unknown() -> None:
    [ocr] = statistics(METRICS, "ocr")["model_stats"]
    assert ocr["inference_count"] == 2


def test_repository_index() -> None:
    assert [(each["name"], each["state"]) for each in repository_index(METRICS)] == [
        ("digits", "READY"),
        ("ocr", "LOADING"),
        ("bad", "UNAVAILABLE"),
    ]
    assert [each["name"] for each in repository_index(METRICS, only_ready=True)] == ["digits"]
