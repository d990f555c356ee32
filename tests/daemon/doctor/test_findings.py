from __future__ import annotations

import json

import pytest

from weightd_daemon.doctor.findings import (
    PROCESS_EXITS,
    Findings,
    exit_status,
    failed,
    passed,
    render_json,
    render_table,
    untestable,
)
from weightd_protocol.version import VERSION

GOOD = {"interpreter": passed("python3: Python 3.11")}
DRIVER = {"driver": passed("24.1")}
BAD = {"current_pid": failed("empty", "source set_env.sh")}
OPEN = {"processes": untestable("unknown", "npu-smi info")}


@pytest.mark.parametrize(
    ("findings", "status"),
    [
        ({**GOOD, **DRIVER}, 0),
        ({**GOOD, **DRIVER, **OPEN}, 0),
        ({**GOOD, **DRIVER, **BAD}, 1),
        (BAD, 1),
        ({**GOOD, PROCESS_EXITS: passed("pidfds"), **OPEN}, 69),  # neither check is about Ascend
        (GOOD, 69),
        ({}, 69),
    ],
)
def test_exit_status_of_findings(findings: Findings, status: int) -> None:
    assert exit_status(findings) == status


def test_table_has_line_and_advice_for_each_finding() -> None:
    assert render_table({**GOOD, **BAD, **OPEN}).splitlines() == [
        "pass          interpreter  python3: Python 3.11",
        "fail          current_pid  empty",
        "                           -> source set_env.sh",
        "not testable  processes    unknown",
        "                           -> npu-smi info",
        "1 pass, 1 fail, 1 not testable",
    ]


def test_table_wraps_text_between_words() -> None:
    path = "/very/long" * 20
    lines = render_table({"driver": failed(f"{'word ' * 40}{path}", "do this " * 30)}).splitlines()
    assert all(len(line) <= 120 or path in line for line in lines)
    assert any(line.strip() == path for line in lines)
    assert all(line.startswith(" " * 22) for line in lines[1:-1])


def test_empty_table() -> None:
    assert render_table({"driver": passed("")}).splitlines()[0] == "pass          driver"
    assert render_table({}) == "0 pass, 0 fail, 0 not testable\n"


def test_json_has_all_findings_in_order() -> None:
    assert json.loads(render_json({**GOOD, **DRIVER, **BAD})) == {
        "weightd": VERSION,
        "exit_status": 1,
        "findings": [
            {"name": "interpreter", "result": "pass", "detail": "python3: Python 3.11", "advice": ""},
            {"name": "driver", "result": "pass", "detail": "24.1", "advice": ""},
            {"name": "current_pid", "result": "fail", "detail": "empty", "advice": "source set_env.sh"},
        ],
    }
