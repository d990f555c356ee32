"""Rank tables: what is generated is good, and whatever is changed in it is refused by the name of the field."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd.daemon.engines import ranktable
from weightd.daemon.engines.ranktable import Device
from weightd.protocol.schema import FieldError

TWO = [Device(4, "192.168.1.8", 16667), Device(5, "192.168.1.9", 16667)]
# As the vendor's documents have it, of an A3.
PODS = {
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


def changed(change: Callable[[dict[str, Any], list[dict[str, Any]]], object]) -> dict[str, Any]:
    """The table of two with a change to it, or to its devices."""
    table: dict[str, Any] = json.loads(ranktable.generate(TWO))
    change(table, table["server_list"][0]["device"])
    return table


@st.composite
def _groups(draw: st.DrawFn) -> list[Device]:
    numbers = draw(st.lists(st.integers(0, 255), min_size=1, max_size=64, unique=True))
    ips = draw(st.lists(st.ip_addresses().map(str), min_size=len(numbers), max_size=len(numbers), unique=True))
    ips = [ip.partition("%")[0] for ip in ips]
    has_ips = draw(st.booleans())
    port = draw(st.sampled_from([0, 1, 16667, 65535]))
    return [Device(number, ip if has_ips else "", port) for number, ip in zip(numbers, ips, strict=True)]


GROUPS = _groups()


@given(GROUPS)
def test_what_is_generated_is_good_and_says_what_it_was_given(group: list[Device]) -> None:
    table = ranktable.parse(ranktable.generate(group, "host"))
    assert (list(table.devices), table.server) == (group, "host")
    assert list(ranktable.of_devices(table, {f"ascend:{rank}": each.number for rank, each in enumerate(group)})) == []


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all texts of a table."""
    if isinstance(value, str):
        return [path]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [each for key, inner in items for each in paths(inner, (*path, key))]


def told(path: tuple[Any, ...]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


@given(GROUPS, st.data())
def test_a_value_that_is_no_text_is_refused_by_its_name(group: list[Device], data: st.DataObject) -> None:
    table = json.loads(ranktable.generate(group))
    *steps, last = path = data.draw(st.sampled_from(paths(table)))
    inner = table
    for step in steps:
        inner = inner[step]
    value = data.draw(st.one_of(st.integers(), st.none(), st.booleans(), st.lists(st.text(max_size=2), max_size=2)))
    inner[last] = value
    assert refusal(table).startswith(f"{told(path)}: expected text, which HCCL has every value as, got ")
    del inner[last]
    if last not in ("server_count", "device_ip", "device_port"):
        assert refusal(table) == f"{told(path)}: missing"


@given(st.text(max_size=200))
def test_what_is_no_table_is_refused_whatever_it_is(text: str) -> None:
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
def test_json_that_is_no_table_is_refused(content: object) -> None:
    refusal(content)


DEVICE = "server_list[0].device[1]"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda table, _: table.update(version="1.1"), "version: expected one of 1.0, 1.2, got '1.1'"),
        (lambda table, _: table.update(status="initializing"), 'status: expected "completed", for else HCCL waits, *'),
        (lambda table, _: table.update(server_count="2"), "server_count: expected \"1\", as server_list has, got '2'"),
        (lambda table, _: table.update(server_list={}), "server_list: expected a list, got dict of 0 items"),
        (lambda table, _: table.update(server_list=[3], server_count="1"), "server_list[0]: expected an object, *"),
        (lambda table, _: table["server_list"][0].update(server_id=""), "server_list[0].server_id: expected 1 to 64 *"),
        (lambda table, _: table["server_list"][0].update(server_id="s" * 65), "server_list[0].server_id: expected 1 *"),
        (lambda _, devices: devices.clear(), "server_list: expected at least one device"),
        (lambda _, devices: devices[1].update(rank_id="0"), f'{DEVICE}.rank_id: "0" is given twice'),
        (lambda _, devices: devices[1].update(rank_id="2"), "server_list: expected ranks 0 to 1, but *"),
        (lambda _, devices: devices[1].update(rank_id="01"), f"{DEVICE}.rank_id: expected a number as text, got '01'"),
        (lambda _, devices: devices[1].update(rank_id="-1"), f"{DEVICE}.rank_id: expected a number as text, got '-1'"),
        (lambda _, devices: devices[1].update(device_id="4"), f'{DEVICE}.device_id: "4" is given twice'),
        (lambda _, devices: devices[1].update(device_id="a"), f"{DEVICE}.device_id: expected a number as text, got *"),
        (lambda _, devices: devices[1].update(device_ip="192.168.1.8"), f'{DEVICE}.device_ip: "192.168.1.8" *'),
        (lambda _, devices: devices[1].update(device_ip="host"), f"{DEVICE}.device_ip: expected an address, *"),
        (lambda _, devices: devices[1].update(device_port="0"), f'{DEVICE}.device_port: expected a port, "1" to *'),
        (lambda _, devices: devices[1].update(device_port="65536"), f"{DEVICE}.device_port: expected a port, *"),
    ],
)  # fmt: skip
def test_each_rule(change: Callable[[Any, Any], object], problem: str) -> None:
    first, *rest = problem.split("*")
    text = refusal(changed(change))
    assert text.startswith(first)
    assert rest or text == first


def test_several_hosts_are_none_of_ours() -> None:
    def change(table: dict[str, Any], devices: list[dict[str, Any]]) -> None:
        table["server_list"].append({"server_id": "other", "device": [devices.pop()]})
        table["server_count"] = "2"

    assert refusal(changed(change)) == "server_list: expected one server, for all ranks are on this host, got 2"


def test_addresses_are_written_if_all_are_known() -> None:
    table = ranktable.parse(ranktable.generate([TWO[0], Device(5)]))
    assert [each.ip for each in table.devices] == ["", ""]
    assert [each.port for each in table.devices] == [16667, 0]


def test_a_table_of_super_pods() -> None:
    table = ranktable.parse(json.dumps(PODS))
    assert table.devices == (Device(0, "192.168.1.6"), Device(1, "192.168.1.7"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda table: table.pop("super_pod_list"), "super_pod_list: missing"),
        (lambda table: table["super_pod_list"][0].clear(), "super_pod_list[0].super_pod_id: missing"),
        (
            lambda table: table["server_list"][0]["device"][0].pop("super_device_id"),
            "server_list[0].device[0].super_device_id: missing",
        ),
        (
            lambda table: table["super_pod_list"].clear(),
            "super_pod_list: expected the servers of server_list, node_0, got ",
        ),
    ],
)
def test_a_rule_of_super_pods(change: Callable[[Any], object], problem: str) -> None:
    content = copy.deepcopy(PODS)
    change(content)
    assert refusal(content) == problem


def test_a_table_of_another_group() -> None:
    table = ranktable.parse(ranktable.generate(TWO))
    of = ranktable.of_devices
    assert list(of(table, {"ascend:0": 4, "ascend:1": None})) == []
    assert list(of(table, {"ascend:0": 5, "ascend:1": 5})) == ["rank 0: expected device_id 5, which ascend:0 is, got 4"]
    assert list(of(table, {"ascend:0": 4})) == ["expected 1 ranks, as devices has, got 2"]


@pytest.mark.parametrize("path", ["/srv/table", "/srv/t.json/x", "/x.json.d/t.json", "/srv/t.json.json", "/t.JSON"])
def test_a_path_that_hccl_does_not_take(path: str) -> None:
    assert list(ranktable.of_path(path)) == [f"expected a path with .json once, at its end, got {path!r}"]
    assert list(ranktable.of_path("/srv/t.json")) == []


def test_addresses_of_the_host() -> None:
    text = (
        "address_0=192.168.1.8\nnetmask_0=255.255.255.0\n address_11 = fe80::1 \naddress_1=none\n#address_2=1.1.1.1\n"
    )
    assert ranktable.addresses(text) == {0: "192.168.1.8", 11: "fe80::1"}
    assert ranktable.addresses("") == {}
