"""Tests of the metrics as text: Prometheus' parser reads the counted values."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Dict, List, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from weightd_common.exposition import COUNTER, FAMILIES, GAUGE, HISTOGRAM, exposition, iterate_text
from weightd_protocol.errors import ERRORS
from weightd_protocol.messages.accounts import AccountStatus, TenantStatus
from weightd_protocol.messages.metrics import Histogram, MetricsResponse, ModelMetrics, ProcessCount, ReloadCounts

SECONDS = (0.0005, 0.1, 1.0, 30.0)
ROWS = (1, 8)
DIGITS = ModelMetrics(
    "digits",
    "onnxruntime",
    "serving",
    True,
    3,
    "5" * 64,
    queued=7,
    running=2,
    processes=(ProcessCount("holder", "holding", 1), ProcessCount("worker", "ready", 4)),
    executions=20,
    unexpected_exits=1,
    restarts=2,
    selftest_failures=3,
    batch_mismatches=4,
    quarantined=5,
    request_seconds=Histogram((1, 2, 0, 1, 1), 65.5),
    queue_seconds=Histogram((5, 0, 0, 0, 0), 0.25),
    compute_seconds=Histogram((0, 4, 0, 0, 0), 0.5),
    batch_rows=Histogram((0, 3, 1), 40.0),
    pss_bytes=100,
    shared_bytes=400,
    saved_bytes=300,
    copy_bytes=99,
    max_queue=1024,
)
ACCOUNT = AccountStatus("digits", 40, 30, 90, 1.5, 2.5, 4000, 500, 3, 1, {"max_rate": 4, "RESOURCE_EXHAUSTED": 5}, 6)
GONE = AccountStatus("", 9, 8, 1, 0.5, 0.5, 1, 1, 0, 0, {"NOT_FOUND": 1, "max_rate": 2})
RESPONSE = MetricsResponse(
    "7",
    "0.1.0",
    "running",
    12.5,
    SECONDS,
    ROWS,
    (DIGITS, replace(DIGITS, name="other", ready=False, pss_bytes=None, saved_bytes=None)),
    (TenantStatus("ann", 2.0, (ACCOUNT, GONE), share=0.75), TenantStatus("bob", 1.0, ())),
    buffered_bytes=11,
    max_memory_bytes=22,
    dropped_responses=33,
    reloads=ReloadCounts(5, 6),
    pss_bytes=44,
)

Samples = Dict[Tuple[str, Tuple[Tuple[str, str], ...]], float]


def families(text: str) -> List[Metric]:
    return [*text_string_to_metric_families(text)]


def samples(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families(text)
        for sample in family.samples
    }


READ = samples(exposition(RESPONSE))


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("build_info", {"version": "0.1.0"}, 1),
        ("uptime_seconds", {}, 12.5),
        ("pss_bytes", {}, 44),
        ("buffered_bytes", {}, 11),
        ("buffered_limit_bytes", {}, 22),
        ("dropped_responses_total", {}, 33),
        ("reloads_total", {"result": "refused"}, 6),
        ("model_info", {"model": "digits", "engine": "onnxruntime", "generation": "3", "sha256": "5" * 64}, 1),
        ("ready", {"model": "digits"}, 1),
        ("ready", {"model": "other"}, 0),
        ("generation", {"model": "digits"}, 3),
        ("processes", {"model": "digits", "role": "worker", "state": "ready"}, 4),
        ("unexpected_exits_total", {"model": "digits"}, 1),
        ("restarts_total", {"model": "digits"}, 2),
        ("selftest_failures_total", {"model": "digits"}, 3),
        ("batch_mismatches_total", {"model": "digits"}, 4),
        ("quarantined", {"model": "digits"}, 5),
        ("executions_total", {"model": "digits"}, 20),
        ("requests_running", {"model": "digits"}, 2),
        ("queue_length", {"model": "digits"}, 7),
        ("queue_limit", {"model": "digits"}, 1024),
        ("model_pss_bytes", {"model": "digits"}, 100),
        ("model_shared_bytes", {"model": "digits"}, 400),
        ("model_copy_bytes", {"model": "digits"}, 99),
        ("model_saved_bytes", {"model": "digits"}, 300),
        ("requests_total", {"model": "digits", "tenant": "ann", "code": "OK"}, 30),
        ("requests_total", {"model": "digits", "tenant": "ann", "code": "RESOURCE_EXHAUSTED"}, 9),
        ("requests_queued", {"model": "digits", "tenant": "ann"}, 1),
        ("requests_in_flight", {"model": "digits", "tenant": "ann"}, 3),
        # Rejected requests without a model belong to sums of the tenant, which stay when a model is removed.
        ("refused_total", {"tenant": "ann", "reason": "max_rate"}, 6),
        ("refused_total", {"tenant": "ann", "reason": "NOT_FOUND"}, 1),
        ("tenant_rows_total", {"tenant": "ann"}, 91),
        ("tenant_slot_seconds_total", {"tenant": "ann"}, 2.0),
        ("tenant_queue_seconds_total", {"tenant": "ann"}, 3.0),
        ("tenant_received_bytes_total", {"tenant": "ann"}, 4001),
        ("tenant_sent_bytes_total", {"tenant": "ann"}, 501),
        ("tenant_unexpected_exits_total", {"tenant": "ann"}, 6),
        ("tenant_unexpected_exits_total", {"tenant": "bob"}, 0),
        ("tenant_weight", {"tenant": "ann"}, 2.0),
        ("tenant_share_ratio", {"tenant": "ann"}, 0.75),
        ("request_duration_seconds_bucket", {"model": "digits", "le": "0.0005"}, 1),
        ("request_duration_seconds_bucket", {"model": "digits", "le": "30"}, 4),
        ("request_duration_seconds_bucket", {"model": "digits", "le": "+Inf"}, 5),
        ("request_duration_seconds_count", {"model": "digits"}, 5),
        ("request_duration_seconds_sum", {"model": "digits"}, 65.5),
        ("queue_duration_seconds_sum", {"model": "digits"}, 0.25),
        ("compute_duration_seconds_sum", {"model": "digits"}, 0.5),
        ("batch_rows_bucket", {"model": "digits", "le": "8"}, 3),
    ],
)
def test_each_value_has_its_name_and_labels(name: str, labels: Dict[str, str], value: float) -> None:
    assert READ[f"weightd_{name}", tuple(sorted(labels.items()))] == value


def test_unknown_value_has_no_sample() -> None:
    for name, label in (("model_pss_bytes", "other"), ("model_saved_bytes", "other"), ("tenant_share_ratio", "bob")):
        key = "tenant" if name.startswith("tenant") else "model"
        assert (f"weightd_{name}", ((key, label),)) not in READ
    assert not any(("model", "") in labels for _, labels in READ)


def test_families_are_unique_and_described() -> None:
    assert len({each.name for each in FAMILIES}) == len(FAMILIES)
    found = families(exposition(RESPONSE))
    assert [(each.name, each.type, each.documentation) for each in found] == [
        (family.name[: -len("_total")] if family.kind == COUNTER else family.name, family.kind, family.help)
        for family in FAMILIES
    ]
    for family in FAMILIES:
        assert re.fullmatch("weightd_[a-z_]+", family.name)
        assert (family.kind == COUNTER) == family.name.endswith("_total")
        assert family.help.endswith(".")
        assert "\n" not in family.help
        assert "\\" not in family.help


def test_tenant_view_omits_hidden_values() -> None:
    none = Histogram((), 0.0)
    zeros = (0, 0, (), 0, 0, 0, 0, 0, 0)
    model = ModelMetrics("digits", "onnxruntime", "serving", True, 0, "", *zeros, none, none, none, none)
    own = replace(RESPONSE, seconds_bounds=(), rows_bounds=(), models=(model,), tenants=RESPONSE.tenants[:1])
    names = {name for name, _ in samples(exposition(own))}
    tenants = {each for each in names if each.startswith("weightd_tenant_")}
    assert names - tenants == {
        "weightd_build_info",
        "weightd_ready",
        "weightd_queue_length",
        "weightd_requests_total",
        "weightd_requests_queued",
        "weightd_requests_in_flight",
        "weightd_refused_total",
    }


@given(st.text(min_size=1), st.text(min_size=1))
def test_escapes_any_name_in_labels(model: str, tenant: str) -> None:
    """The configuration restricts names; the exposition does not rely on that."""
    account = replace(ACCOUNT, model=model)
    response = replace(
        RESPONSE, models=(replace(DIGITS, name=model),), tenants=(TenantStatus(tenant, 1.0, (account,)),)
    )
    read = samples(exposition(response))
    assert read["weightd_ready", (("model", model),)] == 1
    assert len(read) == len(
        samples(exposition(replace(response, models=(DIGITS,), tenants=(TenantStatus("t", 1.0, (ACCOUNT,)),))))
    )
    assert read["weightd_tenant_weight", (("tenant", tenant),)] == 1


BIG = st.integers(0, 2**63 - 1)


@given(st.lists(BIG, min_size=5, max_size=5), st.floats(0, 1e300), BIG)
def test_numbers_are_exact(counts: List[int], total: float, deaths: int) -> None:
    model = replace(DIGITS, request_seconds=Histogram(tuple(counts), total), unexpected_exits=deaths)
    read = samples(exposition(replace(RESPONSE, models=(model,))))
    buckets = [
        float(value)
        for (name, labels), value in read.items()
        if name == "weightd_request_duration_seconds_bucket" and ("model", "digits") in labels
    ]
    assert buckets == [float(sum(counts[: index + 1])) for index in range(5)]
    assert read["weightd_request_duration_seconds_sum", (("model", "digits"),)] == total
    assert math.isclose(read["weightd_unexpected_exits_total", (("model", "digits"),)], deaths)


def test_requests_have_only_known_codes() -> None:
    codes = {dict(labels)["code"] for name, labels in READ if name == "weightd_requests_total"}
    assert codes <= {"OK", *ERRORS}


def test_text_consists_of_small_parts() -> None:
    assert max(map(len, iterate_text(RESPONSE))) < 512
    assert [each for each in FAMILIES if each.kind == HISTOGRAM]


def test_documentation_lists_each_metric() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text("utf-8")
    section = page.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `weightd_")]
    labels = {
        each.name: [*dict.fromkeys(label for sample in each.samples(RESPONSE) for label, _ in sample.labels)]
        for each in FAMILIES
    }
    documented_labels = {name: ", ".join(label for label in listed if label != "le") for name, listed in labels.items()}
    assert lines == [f"| `{each.name}` | {documented_labels[each.name]} | {each.help} |" for each in FAMILIES]
    # The page derives the kind of a metric from the end of its name.
    [counter, *histogram] = re.findall(r"`(_\w+)`", re.findall(r"^Counters end in .*", section, re.MULTILINE)[0])
    for each in FAMILIES:
        kind = COUNTER if each.name.endswith(counter) else GAUGE
        assert each.kind == (HISTOGRAM if each.name.endswith(tuple(histogram)) else kind), each.name
