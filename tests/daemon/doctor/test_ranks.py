from __future__ import annotations

import platform
from pathlib import Path

import pytest

from weightd_daemon.doctor import ranks
from weightd_daemon.doctor.findings import CheckResult, Finding
from weightd_daemon.doctor.ranks import NetworkFacts, read_network
from weightd_daemon.engines import ranktable
from weightd_daemon.engines.ranktable import RankDevice

TWO: dict[str, int | None] = {"ascend:0": 4, "ascend:1": 5}
KNOWN = NetworkFacts("/opt/libhccl.so", ("/opt",), {4: "192.168.1.8", 5: "192.168.1.9"})


def verdict(finding: Finding) -> tuple[str, str]:
    """How it ended; what fails comes with what to do."""
    assert finding.result is not CheckResult.FAIL or finding.advice
    assert finding.result is not CheckResult.PASS or not finding.advice
    return finding.result.value, finding.detail


def test_hccl_is_there_or_not() -> None:
    assert verdict(ranks.check_hccl_library(KNOWN)) == ("pass", "/opt/libhccl.so; it was not loaded")
    assert verdict(ranks.check_hccl_library(NetworkFacts(searched_dirs=("/a", "/b")))) == (
        "fail",
        "no libhccl.so: /a, /b",
    )
    unset = "no libhccl.so: neither LD_LIBRARY_PATH nor ASCEND_HOME_PATH is set"
    assert verdict(ranks.check_hccl_library(NetworkFacts())) == ("fail", unset)


@pytest.mark.parametrize(
    ("cards", "count", "told"),
    [
        (TWO, 2, ("pass", "ascend:0 is card 4, ascend:1 is card 5")),
        (TWO, None, ("not testable", "ascend:0 is card 4, ascend:1 is card 5; how many a process sees is unknown")),
        (TWO, 1, ("fail", "ascend:0 is card 4, ascend:1 is card 5; not there: ascend:1; 1 seen")),
        ({**TWO, "ascend:1": None}, None, ("fail", "ascend:0 is card 4, ascend:1 is card ?; not there: ascend:1")),
        ({**TWO, "ascend:1": None}, 1, ("fail", "ascend:0 is card 4, ascend:1 is card ?; not there: ascend:1; 1 seen")),
        ({"ascend:0": 0}, 1, ("fail", "ascend:0 is card 0: ranks need at least two")),
        ({}, 0, ("fail", "no card here: ranks need at least two")),
    ],
)
def test_the_cards_are_there_or_not(cards: ranks.CardNumbers, count: int | None, told: tuple[str, str]) -> None:
    assert verdict(ranks.check_cards(cards, count)) == told


@pytest.mark.parametrize(
    ("network", "told"),
    [
        (KNOWN, ("pass", "ascend:0: 192.168.1.8, ascend:1: 192.168.1.9")),
        (
            NetworkFacts(conf_error="No such file or directory"),
            ("not testable", "/etc/hccn.conf: No such file or directory: the table that weightd writes has none"),
        ),
        (
            NetworkFacts(addresses={4: "192.168.1.8"}),
            ("not testable", "/etc/hccn.conf has none for ascend:1: the table that weightd writes has none at all"),
        ),
        (NetworkFacts(addresses={4: "::1", 5: "::1"}), ("fail", "/etc/hccn.conf has ::1 for several cards")),
    ],
)
def test_addresses_are_known_or_not(network: NetworkFacts, told: tuple[str, str]) -> None:
    finding = ranks.check_addresses(TWO, network)
    assert verdict(finding) == told
    assert finding.result is CheckResult.PASS or finding.advice


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        (
            {"ascend:0": 0, "ascend:1": 0},
            ("pass", f"no process is on {', '.join(TWO)}, so no process uses port 16666"),
        ),
        (
            {"ascend:0": 0, "ascend:1": 3},
            ("not testable", "processes: 3 on ascend:1; whether one has port 16666 of the card is not seen"),
        ),
        (
            {"ascend:0": OSError("npu-smi is not on PATH")},
            ("not testable", "the processes on ascend:0 are unknown: npu-smi is not on PATH"),
        ),
        ({}, ("not testable", "no card here")),
    ],
)
def test_whether_hccls_port_may_be_taken(counts: dict[str, int | OSError], told: tuple[str, str]) -> None:
    assert verdict(ranks.check_port(counts)) == told


def test_a_table_that_weightd_would_write() -> None:
    told = "weightd would write one for 2 ranks, with addresses"
    assert verdict(ranks.check_rank_table(TWO, KNOWN, "", None)) == ("pass", told)
    told = "weightd would write one for 2 ranks, without addresses"
    assert verdict(ranks.check_rank_table(TWO, NetworkFacts(), "", None)) == ("pass", told)
    less: list[ranks.CardNumbers] = [{"ascend:0": 4}, {**TWO, "ascend:2": None}, {}]
    for cards in less:
        told = "weightd could write none: cards of ranks has the reason"
        assert verdict(ranks.check_rank_table(cards, KNOWN, "", None)) == ("not testable", told)


def test_a_table_that_was_given() -> None:
    table = ranktable.parse(ranktable.generate([RankDevice(4, "192.168.1.8"), RankDevice(5, "192.168.1.9")], "here"))
    assert verdict(ranks.check_rank_table(TWO, KNOWN, "/t.json", table)) == ("pass", "/t.json: 2 ranks on here")
    of_others = verdict(ranks.check_rank_table({"ascend:0": 4, "ascend:1": 6}, KNOWN, "/t.json", table))
    assert of_others == ("fail", "/t.json: rank 1: expected device_id 6, which ascend:1 is, got 5")
    moved = NetworkFacts(addresses={4: "192.168.1.8", 5: "10.0.0.1"})
    text = "/t.json: ascend:1 has the address 10.0.0.1 in /etc/hccn.conf, and 192.168.1.9 here"
    assert verdict(ranks.check_rank_table(TWO, moved, "/t.json", table)) == ("fail", text)
    assert verdict(ranks.check_rank_table({}, NetworkFacts(), "/t.json", table))[0] == "not testable"
    assert verdict(ranks.check_rank_table({}, NetworkFacts(), "/t.json", "version: missing")) == (
        "fail",
        "/t.json: version: missing",
    )


def test_where_there_is_nothing_every_check_has_its_line() -> None:
    told = [*ranks.no_ascend_findings(), ranks.check_rank_table({}, NetworkFacts(), "", None)]
    assert [each.name for each in told] == list(ranks.CHECK_NAMES)
    assert {each.result for each in told} == {CheckResult.NOT_TESTABLE}


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_host_with_nothing(tmp_path: Path) -> None:
    assert read_network({}, tmp_path) == NetworkFacts(conf_error="No such file or directory")


def test_a_host_for_ranks(tmp_path: Path) -> None:
    write(tmp_path / "etc/hccn.conf", "address_0=192.168.1.8\nnetmask_0=255.255.255.0\naddress_1=192.168.1.9\n")
    write(tmp_path / "opt/cann/lib64/libhccl.so")
    seen = read_network({"ASCEND_HOME_PATH": "/opt/cann", "LD_LIBRARY_PATH": "relative:/opt/other:"}, tmp_path)
    machine = f"{platform.machine()}-linux/lib64"
    searched = ("/opt/other", "/opt/cann/lib64", f"/opt/cann/{machine}", "/opt/cann/compiler/lib64")
    addresses = {0: "192.168.1.8", 1: "192.168.1.9"}
    assert seen == NetworkFacts("/opt/cann/lib64/libhccl.so", searched, addresses)


def test_the_loader_looks_first_where_it_is_told(tmp_path: Path) -> None:
    for directory in ("opt/cann/lib64", "opt/own"):
        write(tmp_path / directory / "libhccl.so")
    seen = read_network({"ASCEND_HOME_PATH": "/opt/cann/", "LD_LIBRARY_PATH": "/opt/own/"}, tmp_path)
    assert seen.hccl_path == "/opt/own/libhccl.so"


def test_a_directory_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "etc/hccn.conf").mkdir(parents=True)
    (tmp_path / "lib/libhccl.so").mkdir(parents=True)
    seen = read_network({"LD_LIBRARY_PATH": "/lib"}, tmp_path)
    assert (seen.hccl_path, seen.conf_error) == ("", "Is a directory")
