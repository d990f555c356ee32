from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, List, Optional

import pytest

from weightctl import exit_codes
from weightctl.command import filter_model
from weightctl.status import as_json, exit_status, render
from weightctl.text import WIDTH, binary, count, duration, megabytes, milliseconds, size
from weightd import NotFound
from weightd_common.dashboard.memory import pss_total
from weightd_protocol.messages.accounts import AccountStatus, TenantStatus
from weightd_protocol.messages.status import (
    DeviceStatus,
    GenerationStatus,
    MemoryLimit,
    ModelStatus,
    ProcessStatus,
    ProxyStatus,
    StatusResponse,
    WorkersStatus,
)

MB = 1_000_000
GIB = 2**30

HOLDER = ProcessStatus("digits.3.holder", "holder", "holding", 100, 0, 0, None, None, 200 * MB, 0, private_bytes=9 * MB)
WORKERS = tuple(
    ProcessStatus(
        f"digits.3.w{i}",
        "worker",
        "ready",
        100 + i,
        1000 * i,
        i - 1,
        510.0,
        1220.0,
        30 * MB,
        190 * MB,
        private_bytes=8 * MB,
    )
    for i in (1, 2)
)
DIGITS = ModelStatus(
    name="digits",
    engine="onnxruntime",
    path="/models/digits.onnx",
    state="serving",
    queued=5,
    served=3000,
    failed=2,
    generations=(
        GenerationStatus(
            3, "cpu", "serving", "serving", "", "c82922d93679ad3c" * 4, (HOLDER, *WORKERS), 192 * MB, 1_500 * MB
        ),
    ),
    p50_us=512.4,
    p99_us=1225.0,
)
LOADING = ModelStatus(
    "large", "mindspore_lite", "/models/large.mindir", "attaching", 0, 0, 0,
    (GenerationStatus(1, "cpu", "attaching", "attaching 3/8", "", "ab" * 32, (), 0, 0),),
)  # fmt: skip
FAILED = ModelStatus(
    "bad", "onnxruntime", "/models/bad.onnx", "failed", 0, 0, 7,
    (GenerationStatus(1, "cpu", "failed", "failed", "bad.1.holder: exited with status 65: no graph", "", (), 0, 0),),
)  # fmt: skip
UNLOADED = ModelStatus("ocr", "onnxruntime", "/models/ocr.onnx", "unloaded", 0, 3, 0, (), load="on_demand")


def response(*models: ModelStatus) -> StatusResponse:
    return StatusResponse("id", "0.1.0", "running", 99, 3725.0, 15 * MB, models)


def test_listeners_have_a_line_each() -> None:
    proxies = (
        ProxyStatus("default", "ipc:///run/weightd/weightd.sock", 100, 1, 0),
        ProxyStatus("lan", "tcp://*:5555", 0, 0, 3),
    )
    assert render(replace(response(), zmq_proxies=proxies), 15 * MB).splitlines()[2:4] == [
        "listener default: ipc:///run/weightd/weightd.sock, proxy 100, 1 client",
        "listener lan: tcp://*:5555, proxy starting, 0 clients, 3 restarts",
    ]


def lines(*models: ModelStatus, memory: Optional[MemoryLimit] = None) -> List[str]:
    whole = replace(response(*models), memory=memory)
    return render(whole, pss_total(whole)).splitlines()


def of_digits(**changes: Any) -> ModelStatus:
    """Return the status of the model with a changed generation."""
    return replace(DIGITS, generations=(replace(DIGITS.generations[0], **changes),))


def test_serving_model() -> None:
    assert lines(DIGITS) == [
        "weightd 0.1.0: running, pid 99, up 1 h 2 min",
        "",
        "digits: SERVING, onnxruntime, /models/digits.onnx",
        "  served 3,000, failed 2, queued 5, p50 0.51 ms, p99 1.23 ms",
        "  generation 3 on cpu: serving, sha256 c82922d93679",
        "    PROCESS  ROLE    STATE    PID  SERVED  NOW  P50 ms  P99 ms  PSS MB  OWN MB  SHARED MB",
        "    holder   holder  holding  100       -    -       -       -   200.0     9.0          -",
        "    w1       worker  ready    101   1,000    0    0.51    1.22    30.0     8.0      190.0",
        "    w2       worker  ready    102   2,000    1    0.51    1.22    30.0     8.0      190.0",
        "    sharing saves 1.50 GB: 2 workers on one copy of 192.0 MB instead of 1.69 GB in separate copies",
        "",
        "memory of the service: 275.0 MB PSS, including the daemon's 15.0 MB",
    ]


def test_number_of_workers_has_its_reason() -> None:
    scaled = replace(DIGITS, workers=WorkersStatus(3, 1, 8, "requests waited"))
    assert "  3 of 1 to 8 workers: requests waited" in lines(scaled)
    assert not any("of 1 to" in each for each in lines(DIGITS))


def test_lists_workers_per_set_of_cores() -> None:
    places = ("cpu", "cpu:0", "cpu:1", "cpu:0")
    third = replace(WORKERS[0], name="digits.3.w3")
    there = [replace(each, device=device) for each, device in zip((HOLDER, *WORKERS, third), places)]
    assert lines(of_digits(processes=tuple(there)))[10:12] == ["    on cpu:0: w1, w3", "    on cpu:1: w2"]


def test_lists_workers_with_several_predicts() -> None:
    there = [replace(each, concurrency=4) for each in (HOLDER, *WORKERS)]
    assert lines(of_digits(processes=tuple(there)))[9] == "    4 predicts at once: w1, w2"


def test_ranks_have_device_and_slice() -> None:
    broker = ProcessStatus("digits.3.broker", "broker", "holding", 99, 0, 0, device="cpu")
    ranks = [
        ProcessStatus(f"digits.3.rank{i}", "rank", "ready", 100 + i, 0, 0, device=f"ascend:{i}", sha256=f"{i:064d}")
        for i in (1, 2)
    ]
    shown = of_digits(processes=(broker, *ranks), device="ascend:1+ascend:2")
    after = [
        "    on cpu: broker",
        "    on ascend:1: rank1",
        "    on ascend:2: rank2",
        "    sha256 of slices: rank1 000000000000, rank2 000000000000",
        "",
    ]
    assert lines(shown)[9:14] == after
    assert lines(shown)[6].split()[4:6] == ["-", "-"]


def test_unloaded_model() -> None:
    assert lines(UNLOADED)[2:5] == [
        "ocr: UNLOADED, onnxruntime, /models/ocr.onnx",
        "  served 3, failed 0, queued 0",
        "  loaded on demand",
    ]
    assert "  loaded by weightctl load" in lines(replace(UNLOADED, load="manual"))


def test_memory_that_is_reserved_for_models() -> None:
    reserved = replace(UNLOADED, reserved_bytes=GIB // 2, owner="lab")
    assert "  loaded on demand; 512.0 MiB reserved, charged to tenant lab" in lines(reserved)
    assert "  loaded on demand; 512.0 MiB reserved" in lines(replace(reserved, owner=""))
    budget = replace(response(reserved), model_bytes=GIB // 2, max_model_bytes=2 * GIB)
    assert "reserved for models: 512.0 MiB of 2.00 GiB" in render(budget, 0).splitlines()
    assert "reserved for models" not in render(replace(budget, max_model_bytes=0), 0)


def test_group_process_counts_once() -> None:
    twins = [replace(DIGITS, name=name, group="both") for name in ("one", "two")]
    assert "  in group both: each process serves all models of the group" in render(response(*twins), 0).splitlines()
    assert pss_total(response(*twins)) == pss_total(response(twins[0]))


def test_card_with_buffers_of_ranks() -> None:
    card = DeviceStatus("ascend:0", 1, 63, 10 * MB, 20 * MB, 0, buffer_bytes=400 * MB)
    shown = render(replace(response(), devices=(card,)), 0).splitlines()
    assert shown[2] == "ascend:0: 430.0 MB of unknown capacity, 1 of 63 processes"
    assert shown[4] == "  buffers for communication between ranks 400.0 MB"


def test_loading_and_failed_model() -> None:
    retried = "  next attempt to load the model in 13 s, after 3 failed attempts"
    assert retried in lines(replace(FAILED, retry_s=12.7, attempts=3))
    assert lines(LOADING, FAILED)[2:] == [
        "large: ATTACHING, mindspore_lite, /models/large.mindir",
        "  served 0, failed 0, queued 0",
        "  generation 1 on cpu: attaching 3/8, sha256 abababababab",
        "",
        "bad: FAILED, onnxruntime, /models/bad.onnx",
        "  served 0, failed 7, queued 0",
        "  generation 1 on cpu: failed",
        "    cause: bad.1.holder: exited with status 65: no graph",
        "",
        "memory of the service: 15.0 MB PSS, including the daemon's 15.0 MB",
    ]


def test_loading_model_has_remaining_time() -> None:
    far = replace(LOADING.generations[0], load_fraction=0.437, remaining_s=18.0)
    shown = "  generation 1 on cpu: attaching 3/8, 43 %, about 20 s left, sha256 abababababab"
    assert shown in lines(replace(LOADING, generations=(far,)))


def test_configuration_error_comes_first() -> None:
    assert render(replace(response(), note="c: not TOML"), 0).splitlines()[1:3] == ["  note: c: not TOML", ""]


def account(model: str, **changes: Any) -> AccountStatus:
    whole = AccountStatus(model, 1200, 1000, 4000, 12.345, 0.5, 7 * MB, 3 * MB, 2, 1, {"max_rate": 200})
    return replace(whole, **changes)


def test_tenants_have_a_row_per_model() -> None:
    research = TenantStatus("research", 2.0, (account("digits"), account("", served=0, unexpected_exits=1)), 0.75, 3)
    tenants = (research, TenantStatus("web", 1.0, (account("large"),)), TenantStatus("default", 1.0, ()))
    assert render(replace(response(DIGITS), tenants=tenants), 0).splitlines()[-8:-1] == [
        "TENANT    MODEL    REQUESTS  SERVED  REFUSED  NOW  QUEUED   ROWS  SLOT s  WAIT ms  IN MB  OUT MB",
        "research  digits      1,200   1,000      200    2       1  4,000    12.3      0.5    7.0     3.0",
        "          (other)     1,200       0      200    2       1  4,000    12.3        -    7.0     3.0",
        "research: weight 2; 75% of the seconds of the last minute; refused: max_rate 400; its requests",
        "  crashed 1 worker; (other) includes 3 models that did not fit into the response",
        "no requests of: web, default",
        "",
    ]


def test_tenant_view_has_no_processes_or_memory() -> None:
    own = StatusResponse(
        *("id", "0.1.0", "running", 0, 5.0, 0),
        (ModelStatus("digits", "onnxruntime", "", "serving", 1, 5, 2, ()),),
        tenants=(TenantStatus("ann", 1.0, ()),),
    )
    assert render(own, pss_total(own)).splitlines() == [
        "weightd 0.1.0: running, up 5 s",
        "",
        "digits: SERVING, onnxruntime",
        "  served 5, failed 2, queued 1",
        "",
        "no requests of: ann",
        "",
        "only this tenant's requests are shown; it may not see the status of others",
    ]
    assert exit_status(own) == exit_codes.OK


def test_json_has_tenants() -> None:
    whole = replace(response(), tenants=(TenantStatus("ann", 1.0, (account("m"),)),))
    [ann] = as_json(whole, 0)["tenants"]
    assert (ann["name"], ann["accounts"][0]["failed"]) == ("ann", {"max_rate": 200})
    json.dumps(ann)


def test_notes_follow_the_table() -> None:
    worker = replace(WORKERS[0], shared_bytes=0, note="private memory: the page store is on tmpfs")
    shown = lines(of_digits(processes=(HOLDER, worker), saved_bytes=0, copy_bytes=0, note="no self-test"))
    assert shown[8:11] == [
        "    w1: private memory: the page store is on tmpfs",
        "    note: no self-test",
        "    sharing saves nothing: no worker shares its weights",
    ]


@pytest.mark.parametrize(
    ("copy", "saved", "words"),
    [
        (None, None, "an unknown amount: 2 workers on one copy of unknown size in memory"),
        (0, 0, "nothing yet: 2 workers on one copy, which is on disk until it is used"),
        (9 * MB, 0, "nothing yet: 2 workers on one copy of 9.0 MB"),
    ],
)
def test_reports_saved_memory(copy: Optional[int], saved: Optional[int], words: str) -> None:
    assert lines(of_digits(copy_bytes=copy, saved_bytes=saved))[9] == f"    sharing saves {words}"


def test_unknown_memory_is_a_dash() -> None:
    shown = lines(of_digits(processes=(replace(HOLDER, pss_bytes=None, private_bytes=None, shared_bytes=None),)))
    assert shown[6].split() == ["holder", "holder", "holding", "100", "-", "-", "-", "-", "-", "-", "-"]
    assert shown[-1] == "memory of the service: 15.0 MB PSS, including the daemon's 15.0 MB"


def test_large_numbers_fit_into_100_columns() -> None:
    busy = replace(
        WORKERS[0], name="digits.3.w1024", pid=4_194_304, served=9_999_999, p50_us=12345.6, p99_us=99999.9,
        pss_bytes=99_999 * MB, private_bytes=99_999 * MB, shared_bytes=99_999 * MB, note="word " * 100,
    )  # fmt: skip
    assert max(map(len, lines(of_digits(processes=(busy,), reason="and " * 200)))) <= WIDTH


@pytest.mark.parametrize(
    ("memory", "line"),
    [
        (
            MemoryLimit(1_288_490_189, 4 * GIB, 3 * GIB + GIB // 2, 2, 0.3),
            "1.20 GiB of 4.00 GiB (high 3.50 GiB), pressure 0.3 %, 2 processes killed for lack of memory",
        ),
        (MemoryLimit(GIB, 4 * GIB), "1.00 GiB of 4.00 GiB"),
        (MemoryLimit(GIB // 2, None, GIB, 0, 0.0), "512.0 MiB (high 1.00 GiB), pressure 0 %"),
        (MemoryLimit(GIB, 2 * GIB, 2 * GIB), "1.00 GiB of 2.00 GiB"),
        (MemoryLimit(GIB, None, None, 0, 12.34), "1.00 GiB, pressure 12.34 %"),
        (MemoryLimit(GIB, None, None, 1), "1.00 GiB, 1 process killed for lack of memory"),
    ],
)
def test_last_line_is_the_memory_limit(memory: MemoryLimit, line: str) -> None:
    assert lines(DIGITS, memory=memory) == [*lines(DIGITS), f"memory of the control group: {line}"]
    assert as_json(replace(response(DIGITS), memory=memory), 0)["memory"]["usage_bytes"] == memory.usage_bytes


@pytest.mark.parametrize("memory", [None, MemoryLimit(GIB), MemoryLimit(GIB, None, None, 0, 0.0)])
def test_no_memory_line_without_limit_and_pressure(memory: Optional[MemoryLimit]) -> None:
    assert lines(DIGITS, memory=memory) == lines(DIGITS)


def test_escapes_terminal_sequences() -> None:
    evil = replace(FAILED.generations[0], reason="\x1b[2Jgone\r\nsecond line \x07")
    text = "\n".join(lines(replace(FAILED, name="m\x1b]0;", generations=(evil,))))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "cause: \\x1b[2Jgone\\r\n      second line \\x07" in text


def test_one_model_of_several() -> None:
    whole = response(DIGITS, FAILED)
    assert [model.name for model in filter_model(whole, "bad").models] == ["bad"]
    with pytest.raises(NotFound, match="no model 'nope'; there are: digits, bad"):
        filter_model(whole, "nope")


@pytest.mark.parametrize(
    ("models", "status"),
    [
        ([], exit_codes.OK),
        ([DIGITS, DIGITS], exit_codes.OK),
        ([DIGITS, UNLOADED], exit_codes.OK),
        ([DIGITS, LOADING], exit_codes.NOT_YET),
        ([DIGITS, LOADING, FAILED], exit_codes.ERROR),
        ([replace(DIGITS, state="draining")], exit_codes.NOT_YET),
    ],
)
def test_exit_status_is_of_worst_model(models: List[ModelStatus], status: int) -> None:
    assert exit_status(response(*models)) == status


def test_json_has_response_and_total() -> None:
    whole = response(DIGITS, FAILED)
    read = json.loads(json.dumps(as_json(whole, pss_total(whole))))
    assert read["pss_total_bytes"] == 275 * MB
    assert read["models"][0]["generations"][0]["processes"][1]["p99_us"] == 1220.0
    assert read["models"][0]["generations"][0]["processes"][0]["p50_us"] is None
    assert read["models"][1]["generations"][0]["reason"].endswith("no graph")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ([megabytes(None), megabytes(0), megabytes(1_234_560_000)], ["-", "0.0", "1,234.6"]),
        ([milliseconds(None), milliseconds(0.4), milliseconds(1_500_000.0)], ["-", "0.00", "1,500.00"]),
        ([binary(1), binary(2**30 - 1), binary(2**30)], ["0.0 MiB", "1024.0 MiB", "1.00 GiB"]),
        ([size(1), size(192 * MB), size(5_200 * MB)], ["0.0 MB", "192.0 MB", "5.20 GB"]),
        ([duration(0.9), duration(61), duration(3600), duration(90061)], ["0 s", "1 min 1 s", "1 h 0 min", "1 d 1 h"]),
        ([count(1, "worker"), count(1000, "worker")], ["1 worker", "1,000 workers"]),
        ([count(1, "process"), count(2, "process")], ["1 process", "2 processes"]),
    ],
)
def test_units(shown: List[str], expected: List[str]) -> None:
    assert shown == expected
