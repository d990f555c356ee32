from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weightd.daemon.config.load import Config, ConfigError, parse
from weightd.protocol import limits
from weightd.shared import tcp

DEFAULT = "ipc:///run/w/weightd.sock"


def parsed(listeners: Any, *listening: str, socket: str = "") -> Config:
    daemon = {"runtime_dir": "/run/w", "socket": socket}
    tables = {"daemon": daemon, "listeners": listeners, "models": {"m": {"path": "/m.onnx"}}}
    return parse(tables, Path("/etc/weightd"), listening)


def addresses(config: Config) -> dict[str, str]:
    return {name: each.address for name, each in config.listeners.items()}


def refusal(listeners: Any, *listening: str, socket: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(listeners, *listening, socket=socket)
    [problem] = caught.value.problems
    return problem


def at(*addresses: str) -> dict[str, dict[str, str]]:
    return {f"l{number}": {"address": address} for number, address in enumerate(addresses)}


def test_without_tables_the_daemons_socket_is_the_one_listener() -> None:
    assert addresses(parsed({})) == {"default": DEFAULT}
    assert addresses(parsed({}, socket="tcp://127.0.0.1:5555")) == {"default": "tcp://127.0.0.1:5555"}


def test_with_tables_the_daemons_socket_is_none() -> None:
    config = parsed(at("ipc:///run/w/one.sock", "tcp://[::1]:5555"))
    assert addresses(config) == {"l0": "ipc:///run/w/one.sock", "l1": "tcp://[::1]:5555"}
    assert config.daemon.socket == DEFAULT
    assert config.daemon.unix_socket == Path("/run/w/weightd.sock.unix")


@pytest.mark.parametrize(
    ("listeners", "problem"),
    [
        (3, "listeners: expected tables [listeners.NAME]"),
        ({"a": 3}, "listeners.a: expected a table, got int 3"),
        ({"a": {}}, "listeners.a.address: missing"),
        ({"a": {"adress": "x"}, "b": {}}, None),
        ({"a": {"address": "tcp://*:1", "port": 1}}, "listeners.a.port: unknown key; expected one of address"),
        ({"a": {"address": 3}}, "listeners.a.address: expected text*"),
        ({"-a": {"address": "tcp://*:1"}}, "listeners.-a: expected a listener name of 1 to 64 ASCII letters, *"),
        *(
            (at(address), f"listeners.l0.address: expected ipc:///ABSOLUTE/PATH or {tcp.FORM}, got {address!r}")
            for address in ("/run/a", "ipc://a", "unix:///run/a", "tcp://127.0.0.1:0", "ipc:///run/")
        ),
        (at("ipc:///" + "a" * 107), "listeners.l0.address: expected a socket path of at most 107 bytes, got 108: *"),
        (
            at("ipc:///run/a.unix"),
            "listeners.l0.address: expected a path without .unix, the end of *",
        ),
        (at("tcp://*:1", "tcp://*:1"), "listeners.l1.address: listener l0 has the address 'tcp://*:1' already"),
        (at("ipc:///a/b", "ipc:///a/c/../b"), "listeners.l1.address: listener l0 has the address 'ipc:///a/c/../b' *"),
        (
            at(*(f"tcp://*:{port}" for port in range(1, limits.MAX_LISTENERS + 2))),
            f"listeners: expected at most {limits.MAX_LISTENERS} listeners, got {limits.MAX_LISTENERS + 1}",
        ),
    ],
)
def test_what_is_refused(listeners: Any, problem: str | None) -> None:
    if problem is None:
        with pytest.raises(ConfigError) as caught:
            parsed(listeners)
        assert [each.partition(": ")[0] for each in caught.value.problems] == [
            *("listeners.a.adress", "listeners.a.address", "listeners.b.address")
        ]
        return
    told = refusal(listeners)
    assert told.startswith(problem[:-1]) if problem.endswith("*") else told == problem


def test_a_path_of_107_bytes_is_none_too_long() -> None:
    fits = "ipc:///" + "a" * 106
    assert addresses(parsed(at(fits))) == {"l0": fits}


def test_the_daemons_socket_is_no_unix_socket() -> None:
    assert refusal({}, socket="ipc:///run/a.unix").startswith("daemon.socket: expected a path without .unix, ")


# --- what a service manager has opened ------------------------------------------------------------------------------

PASSED = ("tcp://127.0.0.1:5555", "ipc:///run/x.sock", "unix:///run/x.sock.unix")


def test_without_tables_all_that_is_open_are_listeners_and_the_unix_socket_names_the_daemon() -> None:
    config = parsed({}, *PASSED)
    assert config.daemon.socket == "ipc:///run/x.sock"
    assert addresses(config) == {"default": "ipc:///run/x.sock", "default-2": "tcp://127.0.0.1:5555"}
    # Who opens nothing but the unix socket wants no ZeroMQ.
    assert addresses(parsed({}, PASSED[2])) == {}
    expected = "daemon.socket: expected ipc:///run/x.sock, where the service manager listens (weightd.socket), got "
    assert refusal({}, *PASSED, socket="tcp://127.0.0.1:5555") == f"{expected}'tcp://127.0.0.1:5555'"


def test_tables_name_all_that_is_open_and_may_name_more() -> None:
    more = at(*PASSED[:2], "tcp://127.0.0.1:6666")
    assert [*addresses(parsed(more, *PASSED)).values()] == [*PASSED[:2], "tcp://127.0.0.1:6666"]
    expected = "listeners: expected one at ipc:///run/x.sock, where the service manager listens (weightd.socket)"
    assert refusal(at(PASSED[0]), *PASSED) == expected
