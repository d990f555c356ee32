"""Rendezvous of ranks: a free port and the rank table."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from weightd_common.launch_arguments import RendezvousInfo
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.ranks import RanksConfig
from weightd_daemon.generations.actions import Role
from weightd_daemon.processes import rendezvous, spec
from weightd_daemon.processes.events import SliceSnapshot, Snapshot
from weightd_daemon.processes.files import GenerationFiles
from weightd_daemon.processes.spec import WorkerProgram


def test_port_is_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", rendezvous.free_port()))


@pytest.mark.parametrize(
    ("visible", "ips", "expected"),
    [
        ("", {}, [("0", "10.0.0.1"), ("1", "10.0.0.2")]),
        ("3,2", {"ascend:0": "10.0.0.9", "ascend:1": "10.0.0.8"}, [("3", "10.0.0.9"), ("2", "10.0.0.8")]),
        ("3,2", {"ascend:0": "10.0.0.9"}, [("3", None), ("2", None)]),
        # A card that is not listed in the variable is known only by its number.
        ("0", {}, [("0", "10.0.0.1"), ("1", "10.0.0.2")]),
    ],
)
def test_rank_table_uses_the_cards_of_the_host(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    ips: dict[str, str],
    expected: list[tuple[str, str | None]],
) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    conf = tmp_path / "hccn.conf"
    conf.write_text("address_0=10.0.0.1\naddress_1=10.0.0.2\n")
    monkeypatch.setattr(rendezvous, "_HCCN_CONF", conf)
    table = json.loads(rendezvous.generate_rank_table(["ascend:0", "ascend:1"], ips, 7000))
    devices = table["server_list"][0]["device"]
    assert [(each["device_id"], each.get("device_ip")) for each in devices] == expected
    assert {each["device_port"] for each in devices} == {"7000"}


@pytest.mark.parametrize("table", ["", "{}"])
def test_rank_gets_its_rendezvous(tmp_path: Path, table: str) -> None:
    files = GenerationFiles(tmp_path / "m.1")
    files.create(table)
    rendezvous_info = RendezvousInfo(0, 2, 120, 68, rank_table="/given.json")
    program = WorkerProgram("/python", "mindspore", "/m", "cpu", rendezvous=rendezvous_info, rank_table=table)
    argv = spec.child_spec(program, "m.1.rank0", Role.RANK, "ipc://s", files).arguments
    expected = rendezvous_info._replace(rank_table=str(files.rank_table)) if table else rendezvous_info
    assert RendezvousInfo.from_json(argv[argv.index("--rendezvous") + 1]) == expected
    assert [path.read_text() for path in files.directory.iterdir()] == ([table] if table else [])


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [({0, 1, 2, 5, 6}, ["0-1", "2,5"]), ({0, 1}, ["0", "1"]), ({3}, ["", ""])],
    ids=["several", "one", "too few"],
)
def test_ranks_on_cpu_have_disjoint_cores(
    monkeypatch: pytest.MonkeyPatch, allowed: set[int], expected: list[str]
) -> None:
    monkeypatch.setattr(rendezvous, "allowed_cores", lambda: frozenset(allowed))
    config = ModelConfig("/m", engine="mindspore", ranks=RanksConfig(groups=(("cpu", "cpu"),), size=2))
    snapshot = Snapshot("/m", "", "", 1, slices=tuple(SliceSnapshot(f"/m{each}", "", 1, "") for each in range(2)))
    rendezvous_info = [
        rendezvous.rank_program(config, snapshot, "cpu", rank, rendezvous.Rendezvous()).rendezvous
        for rank in (0, 1, None)
    ]
    assert [each and each.cores for each in rendezvous_info] == [*expected, ""]
