"""Tests of the rank table and of HCCL's environment variables: accepted values, and error codes in the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest

from ascendsim import Host, addresses, ranks
from ascendsim.hccl import groupinfo, products, ranktable, settings
from ascendsim.hccl.errors import HcclError
from ascendsim.program import Program

from ..support import Start, errors_of


def written(tmp_path: Path, *devices: int, **changes: Any) -> Dict[str, Any]:
    """Return the contents of a rank table."""
    table: Dict[str, Any] = json.loads(
        ranks.table(tmp_path / "t.json", devices or (0, 1), **changes).read_text("ascii")
    )
    return table


def no_tick() -> None:
    pytest.fail("the table is complete")


def refusal(values: Dict[str, Any]) -> str:
    with pytest.raises(HcclError) as caught:
        ranktable.parse(values)
    return str(caught.value)


def set_at(values: Dict[str, Any], where: str, value: Any) -> Dict[str, Any]:
    """Set or remove an item of the server ("server.key") or of its second device ("device.key")."""
    place, key = where.split(".")
    item = {"table": values, "server": values["server_list"][0], "device": values["server_list"][0]["device"][-1]}[
        place
    ]
    if value is None:
        del item[key]
    else:
        item[key] = value
    return values


@pytest.mark.parametrize(
    ("where", "value", "code", "reason"),
    [
        ("device.rank_id", 1, "EI0017", "value 1 of rank_id"),  # topoinfo_ranktableParser.cc:343, :396
        ("table.server_count", 1, "EI0017", "server_count"),
        ("device.rank_id", "2", "EI0004", "0 to n-1"),  # config.cc:359
        ("device.rank_id", "0", "EI0004", "0 to n-1"),
        ("device.rank_id", "one", "EI0004", "rank_id"),
        ("device.rank_id", None, "EI0004", "rank_id"),
        ("device.device_id", "0", "EI0004", "duplicate device_id"),
        ("device.device_ip", "192.168.100.101", "EI0004", "duplicate device_ip"),
        ("device.device_ip", "here", "EI0004", "device_ip 'here'"),
        ("device.device_port", "0", "EI0004", "device_port 0"),
        ("server.server_id", "", "EI0004", "server_id"),  # ranktableConcise.cc:262
        ("server.server_id", "n" * 65, "EI0004", "server_id"),
        ("server.device", [], "EI0004", "no device"),
        ("table.server_count", "2", "EI0004", "server_count 2 of 1"),  # ranktableConcise.cc:235
        ("table.version", "1.1", "EI0004", "version '1.1'"),
        ("table.version", None, "EI0004", "version ''"),
        ("table.version", "1.2", "EI0004", "no super_pod_list"),
        ("table.server_list", None, "EI0004", "no server_list"),
    ],
)
def test_rejects_table(tmp_path: Path, where: str, value: Any, code: str, reason: str) -> None:
    text = refusal(set_at(written(tmp_path), where, value))
    assert text.startswith(f"{code}: ")
    assert reason in text


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("table.server_count", None),
        ("device.device_ip", None),
        ("device.device_port", "1024"),
        ("server.server_id", "n" * 64),
        ("server.host_ip", "10.0.0.1"),
    ],
)
def test_accepts_table(tmp_path: Path, where: str, value: Any) -> None:
    table = ranktable.parse(set_at(written(tmp_path, 4, 2), where, value))
    assert [(each.rank, each.device) for each in table.devices] == [(0, 4), (1, 2)]
    assert table.devices[0].port == 16666


def test_crc_covers_parsed_values(tmp_path: Path) -> None:
    """param_check.cc:106: white space does not matter, everything else does."""
    path = tmp_path / "t.json"
    values = written(tmp_path)
    path.write_text(json.dumps(values, indent=4), encoding="ascii")
    assert ranktable.load(str(path), no_tick).crc == ranktable.parse(values).crc
    assert ranktable.parse(set_at(values, "device.device_port", "16666")).crc != ranktable.parse(written(tmp_path)).crc


def of_a3(tmp_path: Path, **changes: Any) -> Dict[str, Any]:
    """Return a table with two dies of one A3 (hccl rank_table_config_a3.md)."""
    pods = [{"super_pod_id": "0", "server_list": [{"server_id": "node_0"}]}]
    values = written(tmp_path, version="1.2", super_pod_list=pods, **changes)
    for number, device in enumerate(values["server_list"][0]["device"]):
        device["super_device_id"] = str(number)
        del device["device_ip"]
    return values


def test_a3_table_has_super_devices_and_pods(tmp_path: Path) -> None:
    assert ranktable.check_process(ranktable.parse(of_a3(tmp_path)), 1, 1, "", products.A3).super_device == "1"
    assert "super_device_id" in refusal(set_at(of_a3(tmp_path), "device.super_device_id", None))
    other = [{"super_pod_id": "0", "server_list": [{"server_id": "node_1"}]}]
    assert "different servers" in refusal({**of_a3(tmp_path), "super_pod_list": other})


OWN = addresses.of_card(1)


@pytest.mark.parametrize(
    ("product", "devices", "mine", "code"),
    [
        ("A2", (0, 1), (1, 1, OWN), ""),
        ("A2", (0, 1, 2, 3, 4), (1, 1, OWN), ""),
        ("A2", (0, 1), (2, 1, OWN), "EI0004"),  # ranktableConcise.cc:144
        ("A2", (0, 1), (0, 1, OWN), "EI0014"),  # :181
        ("A2", (0, 1), (1, 1, "192.168.0.9"), "EI0014"),
        ("A3", (0, 1), (1, 1, OWN), "EI0004"),  # version 1.0
        ("910", (0, 1), (1, 1, OWN), ""),
        ("910", (4, 1), (1, 1, OWN), "EI0004"),  # hccl constraints.md: not across 0-3 and 4-7
        ("910", (0, 1, 2), (1, 1, OWN), "EI0004"),
        ("910", tuple(range(8)), (1, 1, OWN), ""),
        ("910", (8, 1), (1, 1, OWN), "EI0004"),  # ranktableConcise.cc:429
        ("310P", (0, 1), (1, 1, OWN), ""),
        ("310P", (8, 1), (1, 1, OWN), "EI0004"),
    ],
)
def test_table_must_match_process(tmp_path: Path, product: str, devices: Tuple[int, ...], mine: Any, code: str) -> None:
    table = ranktable.parse(written(tmp_path, *devices))
    rank, device, ip = mine
    if code:
        with pytest.raises(HcclError, match=code):
            ranktable.check_process(table, rank, device, ip, product)
    else:
        assert ranktable.check_process(table, rank, device, ip, product).device == 1


def test_products_that_need_an_address(tmp_path: Path) -> None:
    """ranktableConcise.cc:513; rank_table_config_300i_duo.md."""
    one = set_at(written(tmp_path), "device.device_ip", None)
    assert ranktable.check_process(ranktable.parse(one), 1, 1, OWN, products.A2).ip == ""
    with pytest.raises(HcclError, match=r"EI0004.*device_ip is missing"):
        ranktable.check_process(ranktable.parse(one), 1, 1, OWN, products.DUO)
    server = {"server_id": "node_1", "device": [{"device_id": "0", "rank_id": "2"}]}
    two = {**written(tmp_path), "server_count": "2", "server_list": [*one["server_list"], server]}
    with pytest.raises(HcclError, match=r"EI0004.*device_ip is missing"):
        ranktable.check_process(ranktable.parse(two), 1, 1, OWN, products.A2)


@pytest.mark.parametrize("name", ["x.json.d/t.json", "t.txt", "t.json.bak"])
def test_real_path_ends_with_json(tmp_path: Path, name: str) -> None:
    """topoinfo_ranktableParser.cc:50, :140."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    ranks.table(path, [0, 1])
    link = tmp_path / "link.json"
    link.symlink_to(path)
    with pytest.raises(HcclError, match=r"EI0004.*\.json file"):
        ranktable.load(str(link), no_tick)


def test_polls_incomplete_table_for_half_an_hour(tmp_path: Path) -> None:
    """topoinfo_ranktableParser.cc:36, :170-200."""
    path = tmp_path / "t.json"
    ticks: List[int] = []
    ranks.table(path, [0, 1], status="initializing")

    def tick() -> None:
        ticks.append(1)
        if len(ticks) == 5:
            ranks.table(path, [0, 1])

    assert len(ranktable.load(str(path), tick).devices) == 2
    assert len(ticks) == 5
    ranks.table(path, [0, 1], status="initializing")
    with pytest.raises(HcclError, match="1800 s"):
        ranktable.load(str(path), tick)
    assert len(ticks) == 5 + 1800


def test_build_waits_for_table_and_ignores_signals(program: Program, host: Host, tmp_path: Path) -> None:
    host.switch(hccl_second=0.01)
    cut, table = ranks.mlp(tmp_path / "slices"), ranks.table(tmp_path / "t.json", [0, 1], status="initializing")
    program.begin("rank(path, table, 0)", path=cut.paths[0], table=table)
    assert not program.has_answered(0.1)
    ranks.table(tmp_path / "new.json", [0, 1]).replace(table)
    program.result()


@pytest.mark.parametrize("text", ["", "{}", "[]", "{", '{"status": 1}'])
def test_invalid_table_fails_build(program: Program, tmp_path: Path, text: str) -> None:
    cut, table = ranks.mlp(tmp_path / "slices"), tmp_path / "t.json"
    build = {"path": cut.paths[0], "table": table}
    assert "EI0004" in errors_of(program, "rank(path, table, 0)", **build)[-1]
    table.write_text(text, encoding="ascii")
    assert "EI0004" in errors_of(program, "rank(path, table, 0)")[-1]


def test_dict_takes_precedence_over_file(program: Program, tmp_path: Path) -> None:
    cut, table, file = ranks.mlp(tmp_path / "s"), ranks.table(tmp_path / "t.json", [0, 1]), tmp_path / "c.ini"
    file.write_text("[ascend_context]\nprovider=ge\nrank_table_file=/nowhere.json\n", encoding="ascii")
    build = "build(path, options={'config_path': file}, config={'ascend_context': section})"
    section: Dict[str, str] = {}
    assert "EI0004" in errors_of(program, build, path=cut.paths[0], file=str(file), section=section)[-1]
    program.do(build, section={"rank_table_file": str(table)})


def test_device_ids_are_host_numbers(start: Start, host: Host, tmp_path: Path) -> None:
    """A process counts its visible cards; the table uses N of /dev/davinciN (ranktableConcise.cc:438)."""
    cut, table = ranks.mlp(tmp_path / "slices"), ranks.table(tmp_path / "t.json", [1, 0])
    build = "rank(path, table, 0, device=0)"
    start(ASCEND_RT_VISIBLE_DEVICES="1").do(build, path=cut.paths[0], table=table)
    assert host.card_state(1).processes
    assert "EI0014" in errors_of(start(), build, path=cut.paths[0], table=table)[-1]


# --- variables --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("product", "variables", "option", "expected"),
    [
        ("A2", {}, "", (120, 1836, 200)),
        ("910", {}, "", (120, 1836, 200)),
        ("A2", {"HCCL_EXEC_TIMEOUT": "0", "HCCL_CONNECT_TIMEOUT": "7200", "HCCL_BUFFSIZE": "1"}, "", (7200, 0, 1)),
        ("A2", {"HCCL_EXEC_TIMEOUT": "100"}, "5", (120, 5, 200)),
        ("910", {"HCCL_EXEC_TIMEOUT": "0"}, "", (120, 68, 200)),
        ("910", {"HCCL_EXEC_TIMEOUT": "200"}, "", (120, 136, 200)),
        ("310P", {"HCCL_EXEC_TIMEOUT": "99999"}, "", (120, 17340, 200)),
    ],
)
def test_timeouts_of_product(product: str, variables: Any, option: str, expected: Any) -> None:
    """hccl HCCL_EXEC_TIMEOUT.md: steps of 68 s on a 910 and a 310P; the option takes precedence
    (hcom_plugin.cc:277)."""
    assert settings.read(variables, option, product) == expected


@pytest.mark.parametrize(
    "variables",
    [
        {"HCCL_CONNECT_TIMEOUT": "119"},
        {"HCCL_CONNECT_TIMEOUT": "7201"},
        {"HCCL_CONNECT_TIMEOUT": "120.5"},
        {"HCCL_EXEC_TIMEOUT": "-1"},
        {"HCCL_BUFFSIZE": "0"},
    ],
)
def test_wrong_variable_fails_build(start: Start, tmp_path: Path, variables: Dict[str, str]) -> None:
    """externalinput.cc:530, :972: error EI0001."""
    cut, table = ranks.mlp(tmp_path / "slices"), ranks.table(tmp_path / "t.json", [0, 1])
    assert "EI0001" in errors_of(start(**variables), "rank(path, table, 0)", path=cut.paths[0], table=table)[-1]


def test_chip_names() -> None:
    names = {
        "Ascend910_9382": "A3",
        "Ascend910B3": "A2",
        "Ascend910A": "910",
        "Ascend310P3": "310P",
        "Ascend310": "310",
    }
    assert {name: products.kind(name) for name in names} == names
    assert products.has_ports("A2", "25.0.RC1")
    assert not products.has_ports("A2", "24.1.0")
    assert not products.has_ports("910", "25.5.0")


def test_group_info_file_round_trips(tmp_path: Path) -> None:
    groups = {"2-1": [0, 300], "p": [1]}
    assert groupinfo.read(groupinfo.write(tmp_path / "g.pb", groups)) == groups
    for wrong in (b"\xff", b"\x0a\x05x"):
        (tmp_path / "g.pb").write_bytes(wrong)
        with pytest.raises(ValueError, match="no such message"):
            groupinfo.read(tmp_path / "g.pb")
