from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest

from weightd_daemon.doctor import ranks
from weightd_daemon.doctor.findings import CheckResult, Verdict
from weightd_daemon.doctor.host import NpuInfo
from weightd_daemon.engines import ranktable
from weightd_daemon.engines.ranktable import RankDevice

from .hosts import FAIL, OPEN, PASS, check, make_host, prints, report

# Two devices, which are cards 4 and 5, with their addresses.
VISIBLE = {"ASCEND_RT_VISIBLE_DEVICES": "4,5"}
CONF = "address_4=192.168.1.8\nnetmask_4=255.255.255.0\naddress_5=192.168.1.9\n"
CARDS = "ascend:0 is card 4, ascend:1 is card 5"


def verdict(
    root: Path, name: str, conf: str | None = CONF, *, environment: dict[str, str] | None = None, **facts: Any
) -> Verdict:
    files = {} if conf is None else {"etc/hccn.conf": conf}
    host = make_host(root, files, **{"ranks": (0, 1), "environment": {**VISIBLE, **(environment or {})}, **facts})
    return ranks.CHECKS[name](host)


LIB = f"{platform.machine()}-linux/lib64"


@pytest.mark.parametrize(
    ("files", "environment", "expected"),
    [
        (
            [],
            {"ASCEND_HOME_PATH": "/opt/cann", "LD_LIBRARY_PATH": "relative:/a:"},
            f"no libhccl.so: /a, /opt/cann/lib64, /opt/cann/{LIB}, /opt/cann/compiler/lib64",
        ),
        ([], {}, "no libhccl.so: neither LD_LIBRARY_PATH nor ASCEND_HOME_PATH is set"),
        (["opt/cann/lib64"], {"ASCEND_HOME_PATH": "/opt/cann"}, "/opt/cann/lib64/libhccl.so; not loaded by this check"),
        # LD_LIBRARY_PATH has priority.
        (
            ["opt/cann/lib64", "opt/own"],
            {"ASCEND_HOME_PATH": "/opt/cann/", "LD_LIBRARY_PATH": "/opt/own/"},
            "/opt/own/libhccl.so; not loaded by this check",
        ),
        # A directory of this name is not a library.
        (["lib/libhccl.so"], {"LD_LIBRARY_PATH": "/lib"}, "no libhccl.so: /lib"),
    ],
)
def test_hccl_library_is_searched(tmp_path: Path, files: list[str], environment: dict[str, str], expected: str) -> None:
    for directory in files:
        (tmp_path / directory).mkdir(parents=True)
        (tmp_path / directory / "libhccl.so").touch()
    found = verdict(tmp_path, "hccl", environment=environment)
    check(found, FAIL if expected.startswith("no ") else PASS)
    assert found.detail == expected


@pytest.mark.parametrize(
    ("devices", "count", "expected"),
    [
        ((0, 1), 2, (PASS, CARDS)),
        ((), 2, (PASS, CARDS)),
        ((0, 1), None, (OPEN, f"{CARDS}; the number of devices that a process can use is unknown")),
        ((0, 1), 1, (FAIL, f"{CARDS}; missing: ascend:1; devices found: 1")),
        ((0, 2), None, (FAIL, "ascend:0 is card 4, ascend:2 is card ?; missing: ascend:2")),
        ((0, 2), 1, (FAIL, "ascend:0 is card 4, ascend:2 is card ?; missing: ascend:2; devices found: 1")),
        ((0,), 1, (FAIL, "ascend:0 is card 4: ranks need at least two")),
        ((), 0, (FAIL, "no card found: ranks need at least two")),
    ],
)
def test_cards_of_ranks_must_exist(
    tmp_path: Path, devices: tuple[int, ...], count: int | None, expected: tuple[CheckResult, str]
) -> None:
    seen = report(devices={} if count is None else {"count": count})
    found = verdict(tmp_path, "cards of ranks", ranks=devices, report=seen)
    check(found, expected[0])
    assert found.detail == expected[1]


@pytest.mark.parametrize(
    ("conf", "expected", "text"),
    [
        (CONF, PASS, "ascend:0: 192.168.1.8, ascend:1: 192.168.1.9"),
        (None, OPEN, "/etc/hccn.conf: No such file or directory: a generated rank table would have no addresses"),
        (
            CONF.partition("address_5")[0],
            OPEN,
            "has no address of ascend:1: a generated rank table would have none at all",
        ),
        ("address_4=::1\naddress_5=::1\n", FAIL, "/etc/hccn.conf has ::1 for several cards"),
    ],
)
def test_device_addresses_are_read(tmp_path: Path, conf: str | None, expected: CheckResult, text: str) -> None:
    found = verdict(tmp_path, "device addresses", conf)
    check(found, expected, text)
    assert found.advice or expected is PASS


def test_address_file_that_is_directory(tmp_path: Path) -> None:
    (tmp_path / "etc/hccn.conf").mkdir(parents=True)
    check(verdict(tmp_path, "device addresses", None), OPEN, "/etc/hccn.conf: Is a directory: a generated rank table")


NPUS = NpuInfo(0, 0, 4), NpuInfo(0, 1, 5)


@pytest.mark.parametrize(
    ("facts", "expected", "text"),
    [
        ({"npus": NPUS, "processes": 0}, PASS, "no process is on ascend:0, ascend:1, so no process uses port 16666"),
        (
            {"npus": NPUS, "processes": 3},
            OPEN,
            "processes: 3 on ascend:1; the host cannot see whether one uses port 16666",
        ),
        ({}, OPEN, "the processes on ascend:0 are unknown: npu-smi is not on PATH"),
        ({"ranks": (), "report": report(devices={"count": 0})}, OPEN, "no card found"),
    ],
)
def test_hccl_port_is_checked_for_other_processes(
    tmp_path: Path, facts: dict[str, Any], expected: CheckResult, text: str
) -> None:
    facts = dict(facts)
    if "processes" in facts:
        processes = "Chip ID : 0\n" + "Process id:7\n" * facts.pop("processes") + "Chip ID : 1\n"
        facts["run_command"] = prints(processes)
    check(verdict(tmp_path, "hccl port", **facts), expected, text)


@pytest.mark.parametrize(
    ("conf", "devices", "expected", "text"),
    [
        (CONF, (0, 1), PASS, "weightd would generate a rank table for 2 ranks, with addresses"),
        ("", (0, 1), PASS, "weightd would generate a rank table for 2 ranks, without addresses"),
        *(
            (CONF, each, OPEN, "weightd could not generate a rank table: see the check 'cards of ranks'")
            for each in ((0,), (0, 1, 2))
        ),
    ],
)
def test_describes_generated_rank_table(
    tmp_path: Path, conf: str, devices: tuple[int, ...], expected: CheckResult, text: str
) -> None:
    check(verdict(tmp_path, "rank table", conf, ranks=devices), expected, text)


@pytest.mark.parametrize(
    ("facts", "conf", "expected", "text"),
    [
        ({}, CONF, PASS, "table.json: 2 ranks on here"),
        ({}, None, PASS, "table.json: 2 ranks on here"),
        (
            {"environment": {"ASCEND_RT_VISIBLE_DEVICES": "4,6"}},
            CONF,
            FAIL,
            "table.json: rank 1: expected device_id 6, which ascend:1 is, got 5",
        ),
        (
            {},
            CONF.replace("192.168.1.9", "10.0.0.1"),
            FAIL,
            "table.json: ascend:1 has the address 10.0.0.1 in /etc/hccn.conf, but 192.168.1.9 in the rank table",
        ),
        ({"has_cards": False}, CONF, OPEN, "valid, but there are no cards to compare it with"),
        ({"has_cards": False, "text": "{}"}, CONF, FAIL, "table.json: "),
    ],
)
def test_given_rank_table_is_compared_with_cards(
    tmp_path: Path, facts: dict[str, Any], conf: str | None, expected: CheckResult, text: str
) -> None:
    facts = dict(facts)
    table = tmp_path / "table.json"
    good = ranktable.generate([RankDevice(4, "192.168.1.8"), RankDevice(5, "192.168.1.9")], "here")
    table.write_text(facts.pop("text", good))
    if not facts.pop("has_cards", True):
        facts["report"] = report(libascendcl="no", current_pid={"pid": ""})
    check(verdict(tmp_path, "rank table", conf, rank_table=table, **facts), expected, text)
