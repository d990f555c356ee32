"""Tests of rank tables: generated tables are valid, and the parser rejects each invalid field by name."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_daemon.engines import ranktable
from weightd_daemon.engines.ranktable import RankDevice
from weightd_protocol.schema import FieldError

Path = tuple[str | int, ...]
REMOVED = object()

TWO = [RankDevice(4, "192.168.1.8", 16667), RankDevice(5, "192.168.1.9", 16667)]
# Example of an Atlas A3 server from the vendor's documentation.
PODS: dict[str, Any] = {
    "version": "1.2",
    "server_count": "1",
    "status": "completed",
    "server_list": [
        {
            "server_id": "node_0",
            "host_ip": "172.16.0.1",
            "device": [
                {"device_id": "0", "super_device_id": "0", "device_ip": "192.168.1.6", "rank_id": "0"},
                {"device_id": "1", "super_device_id": "1", "device_ip": "192.168.1.7", "rank_id": "1"},
            ],
        }
    ],
    "super_pod_list": [{"super_pod_id": "0", "server_list": [{"server_id": "node_0"}]}],
}


def refusal(content: object) -> str:
    with pytest.raises(FieldError) as caught:
        ranktable.parse(json.dumps(content))
    return str(caught.value)


def changed(table: dict[str, Any], path: Path, value: object) -> dict[str, Any]:
    """Return a copy of the table with another value at this path, or without the field (REMOVED)."""
    changed: Any = copy.deepcopy(table)
    *steps, last = path
    inner = changed
    for step in steps:
        inner = inner[step]
    if value is REMOVED:
        del inner[last]
    else:
        inner[last] = value
    return changed  # type: ignore[no-any-return]


@st.composite
def _groups(draw: st.DrawFn) -> list[RankDevice]:
    numbers = draw(st.lists(st.integers(0, 255), min_size=1, max_size=64, unique=True))
    ips = draw(st.lists(st.ip_addresses().map(str), min_size=len(numbers), max_size=len(numbers), unique=True))
    has_ips = draw(st.booleans())
    port = draw(st.sampled_from([0, 1, 16667, 65535]))
    return [RankDevice(number, ip if has_ips else "", port) for number, ip in zip(numbers, ips, strict=True)]


GROUPS = _groups()


@given(GROUPS)
def test_parses_generated_table(group: list[RankDevice]) -> None:
    table = ranktable.parse(ranktable.generate(group, "host"))
    assert (list(table.devices), table.server) == (group, "host")
    assert (
        list(ranktable.device_problems(table, {f"ascend:{rank}": each.physical_id for rank, each in enumerate(group)}))
        == []
    )


def paths(value: Any, path: Path = ()) -> list[Path]:
    """Return the paths of all text values."""
    if isinstance(value, str):
        return [path]
    steps: list[Any] = [*value] if hasattr(value, "keys") else [*range(len(value))]
    return [each for step in steps for each in paths(value[step], (*path, step))]


def field_name(path: Path) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


NO_TEXT = st.one_of(st.integers(), st.none(), st.booleans(), st.lists(st.text(max_size=2), max_size=2))


@given(GROUPS, st.data(), NO_TEXT)
def test_values_must_be_text(group: list[RankDevice], data: st.DataObject, value: object) -> None:
    table: dict[str, Any] = json.loads(ranktable.generate(group))
    path = data.draw(st.sampled_from(paths(table)))
    text = refusal(changed(table, path, value))
    assert text.startswith(f"{field_name(path)}: expected text, as HCCL stores every value, got ")
    if path[-1] not in ("server_count", "device_ip", "device_port"):
        assert refusal(changed(table, path, REMOVED)) == f"{field_name(path)}: missing"


@given(st.text(max_size=200))
def test_invalid_text_is_rejected(text: str) -> None:
    with pytest.raises(FieldError):
        ranktable.parse(text)


@given(
    st.recursive(
        st.none() | st.text(max_size=9) | st.integers(),
        lambda each: (
            st.lists(each)
            | st.dictionaries(
                st.sampled_from(["version", "status", "server_list", "server_id", "device", "rank_id"]), each
            )
        ),
        max_leaves=9,
    )
)
def test_rejects_json_that_is_not_rank_table(content: object) -> None:
    refusal(content)


SERVER: Path = ("server_list", 0)
FIRST: Path = (*SERVER, "device", 0)
SECOND: Path = (*SERVER, "device", 1)
DEVICE = "server_list[0].device[1]"


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("version",), "1.1", "version: expected one of 1.0, 1.2, got '1.1'"),
        (("status",), "initializing", 'status: expected "completed", because HCCL waits otherwise, *'),
        (("server_count",), "2", "server_count: expected \"1\", as server_list has, got '2'"),
        (("server_list",), {}, "server_list: expected a list, got dict of 0 items"),
        (("server_list",), [3], "server_list[0]: expected an object, got int 3"),
        ((*SERVER, "server_id"), "", "server_list[0].server_id: expected 1 to 64 characters, got 0"),
        ((*SERVER, "server_id"), "s" * 65, "server_list[0].server_id: expected 1 to 64 characters, got 65"),
        ((*SERVER, "device"), [], "server_list: expected at least one device"),
        ((*SECOND, "rank_id"), "0", f'{DEVICE}.rank_id: "0" is given twice'),
        ((*SECOND, "rank_id"), "2", "server_list: expected ranks 0 to 1, but there is no rank 1"),
        ((*SECOND, "rank_id"), "01", f"{DEVICE}.rank_id: expected a number as text, got '01'"),
        ((*SECOND, "rank_id"), "-1", f"{DEVICE}.rank_id: expected a number as text, got '-1'"),
        ((*SECOND, "device_id"), "4", f'{DEVICE}.device_id: "4" is given twice'),
        ((*SECOND, "device_id"), "a", f"{DEVICE}.device_id: expected a number as text, got 'a'"),
        ((*SECOND, "device_ip"), "192.168.1.8", f'{DEVICE}.device_ip: "192.168.1.8" is given twice'),
        ((*SECOND, "device_ip"), "host", f"{DEVICE}.device_ip: expected an address, got 'host'"),
        ((*SECOND, "device_port"), "0", f'{DEVICE}.device_port: expected a port, "1" to "65535", got "0"'),
        ((*SECOND, "device_port"), "65536", f'{DEVICE}.device_port: expected a port, "1" to "65535", got "65536"'),
    ],
)
def test_rejects_invalid_field(path: Path, value: object, problem: str) -> None:
    first, *rest = problem.split("*")
    text = refusal(changed(json.loads(ranktable.generate(TWO)), path, value))
    assert text.startswith(first)
    assert rest or text == first


def test_rejects_table_of_several_servers() -> None:
    table: dict[str, Any] = json.loads(ranktable.generate(TWO))
    other = {"server_id": "other", "device": [table["server_list"][0]["device"].pop()]}
    table = {**table, "server_list": [*table["server_list"], other], "server_count": "2"}
    assert refusal(table) == "server_list: expected one server, because all ranks are on this host, got 2"


def test_writes_addresses_only_if_all_are_known() -> None:
    table = ranktable.parse(ranktable.generate([TWO[0], RankDevice(5)]))
    assert [each.ip for each in table.devices] == ["", ""]
    assert [each.port for each in table.devices] == [16667, 0]


def test_super_pod_table() -> None:
    table = ranktable.parse(json.dumps(PODS))
    assert table.devices == (RankDevice(0, "192.168.1.6"), RankDevice(1, "192.168.1.7"))


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("super_pod_list",), REMOVED, "super_pod_list: missing"),
        (("super_pod_list", 0, "super_pod_id"), REMOVED, "super_pod_list[0].super_pod_id: missing"),
        ((*FIRST, "super_device_id"), REMOVED, "server_list[0].device[0].super_device_id: missing"),
        (("super_pod_list",), [], "super_pod_list: expected the servers of server_list, node_0, got "),
    ],
)
def test_rejects_invalid_super_pod_field(path: Path, value: object, problem: str) -> None:
    assert refusal(changed(PODS, path, value)) == problem


def test_compares_devices_with_configuration() -> None:
    table = ranktable.parse(ranktable.generate(TWO))
    of = ranktable.device_problems
    assert list(of(table, {"ascend:0": 4, "ascend:1": None})) == []
    assert list(of(table, {"ascend:0": 5, "ascend:1": 5})) == ["rank 0: expected device_id 5, which ascend:0 is, got 4"]
    assert list(of(table, {"ascend:0": 4})) == ["expected 1 ranks, as devices has, got 2"]


@pytest.mark.parametrize("path", ["/srv/table", "/srv/t.json/x", "/x.json.d/t.json", "/srv/t.json.json", "/t.JSON"])
def test_rank_table_path_must_end_in_json(path: str) -> None:
    assert list(ranktable.path_problems(path)) == [f"expected a path with .json once, at its end, got {path!r}"]
    assert list(ranktable.path_problems("/srv/t.json")) == []


def test_parses_addresses_of_cards() -> None:
    text = (
        "address_0=192.168.1.8\nnetmask_0=255.255.255.0\n address_11 = fe80::1 \naddress_1=none\n#address_2=1.1.1.1\n"
    )
    assert ranktable.parse_addresses(text) == {0: "192.168.1.8", 11: "fe80::1"}
    assert ranktable.parse_addresses("") == {}


@pytest.mark.parametrize(
    ("device", "visible", "number"),
    [(0, "", 0), (3, " ", 3), (0, "4,5", 4), (1, "4, 5", 5), (2, "4,5", None), (0, "0-3", None), (0, "²", None)],
)
def test_physical_id_follows_visible_devices(device: int, visible: str, number: int | None) -> None:
    assert ranktable.physical_id(device, visible) == number
