from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weightd_common import curve_keys as keys_module
from weightd_common import endpoints
from weightd_common.curve_keys import format_key_file
from weightd_daemon.config.listeners import allowed_keys
from weightd_daemon.config.load import Config, ConfigError, parse
from weightd_protocol import limits

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


def at(*addresses: str) -> dict[str, dict[str, object]]:
    return {
        f"l{number}": {"address": address, **({"insecure": True} if address.startswith("tcp://") else {})}
        for number, address in enumerate(addresses)
    }


def test_default_listener_is_daemon_socket() -> None:
    assert addresses(parsed({})) == {"default": DEFAULT}
    over_tcp = parsed(at("tcp://127.0.0.1:5555"), socket="tcp://127.0.0.1:5555")
    assert addresses(over_tcp) == {"l0": "tcp://127.0.0.1:5555"}


@pytest.mark.parametrize("listening", [(), ("tcp://127.0.0.1:5555", "unix:///run/x.sock.unix")])
def test_tcp_listener_needs_explicit_security(listening: tuple[str, ...]) -> None:
    socket = "" if listening else "tcp://127.0.0.1:5555"
    assert (
        refusal({}, *listening, socket=socket)
        == 'listeners: expected a table [listeners.NAME] with address = "tcp://127.0.0.1:5555" that has security = '
        '"curve", or insecure = true: over TCP without CURVE, any client that reaches the port can send requests, and '
        "anyone on the network path can read and change messages"
    )


def test_listener_tables_replace_default_listener() -> None:
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
        ({"a": {"address": "ipc:///a", "port": 1}}, "listeners.a.port: unknown key; expected one of address, *"),
        ({"a": {"address": 3}}, "listeners.a.address: expected text*"),
        ({"-a": {"address": "ipc:///a"}}, "listeners.-a: expected a listener name of 1 to 64 ASCII letters, *"),
        *(
            (
                at(address),
                (
                    f"listeners.l0.address: expected ipc:///ABSOLUTE/PATH or {endpoints.TCP_ADDRESS_FORM}, "
                    f"got {address!r}"
                ),
            )
            for address in ("/run/a", "ipc://a", "unix:///run/a", "tcp://127.0.0.1:0", "ipc:///run/")
        ),
        (at("ipc:///" + "a" * 107), "listeners.l0.address: expected a socket path of at most 107 bytes, got 108: *"),
        (
            at("ipc:///run/a.unix"),
            "listeners.l0.address: expected a path without the suffix .unix of *",
        ),
        (at("tcp://*:1", "tcp://*:1"), "listeners.l1.address: listener l0 already has the address 'tcp://*:1'"),
        (
            at("ipc:///a/b", "ipc:///a/c/../b"),
            "listeners.l1.address: listener l0 already has the address 'ipc:///a/c/../b'",
        ),
        (
            at(*(f"tcp://*:{port}" for port in range(1, limits.MAX_LISTENERS + 2))),
            f"listeners: expected at most {limits.MAX_LISTENERS} listeners, got {limits.MAX_LISTENERS + 1}",
        ),
    ],
)
def test_rejects_invalid_listeners(listeners: Any, problem: str | None) -> None:
    if problem is None:
        with pytest.raises(ConfigError) as caught:
            parsed(listeners)
        assert [each.partition(": ")[0] for each in caught.value.problems] == [
            *("listeners.a.adress", "listeners.a.address", "listeners.b.address")
        ]
        return
    reported = refusal(listeners)
    assert reported.startswith(problem[:-1]) if problem.endswith("*") else reported == problem


def test_accepts_path_of_107_bytes() -> None:
    fits = "ipc:///" + "a" * 106
    assert addresses(parsed(at(fits))) == {"l0": fits}


def test_daemon_socket_cannot_end_in_unix() -> None:
    assert refusal({}, socket="ipc:///run/a.unix").startswith(
        "daemon.socket: expected a path without the suffix .unix "
    )


# --- sockets that the service manager opened -------------------------------------------------------------------------

PASSED = ("tcp://127.0.0.1:5555", "ipc:///run/x.sock", "unix:///run/x.sock.unix")


def test_passed_sockets_become_listeners_without_tables() -> None:
    config = parsed({}, "ipc:///run/y.sock", *PASSED[1:])
    assert config.daemon.socket == "ipc:///run/x.sock"
    assert addresses(config) == {"default": "ipc:///run/x.sock", "default-2": "ipc:///run/y.sock"}
    # A service manager that opens only the Unix socket disables ZeroMQ.
    assert addresses(parsed({}, PASSED[2])) == {}
    expected = "daemon.socket: expected ipc:///run/x.sock, on which the service manager listens (weightd.socket), got "
    assert refusal({}, *PASSED[1:], socket="ipc:///run/y.sock") == f"{expected}'ipc:///run/y.sock'"


def test_tables_must_include_all_passed_sockets() -> None:
    more = at(*PASSED[:2], "tcp://127.0.0.1:6666")
    assert [*addresses(parsed(more, *PASSED)).values()] == [*PASSED[:2], "tcp://127.0.0.1:6666"]
    expected = (
        "listeners: expected a listener with address ipc:///run/x.sock, on which the service manager listens "
        "(weightd.socket)"
    )
    assert refusal(at(PASSED[0]), *PASSED) == expected


# --- keys -----------------------------------------------------------------------------------------------------------

SECRET, PUBLIC = "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs", "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    (tmp_path / "listener.key").write_text(format_key_file(keys_module.SECRET, SECRET))
    (tmp_path / "listener.key").chmod(0o600)
    (tmp_path / "ann.pub").write_text(format_key_file(keys_module.PUBLIC, PUBLIC))
    return tmp_path


def curve(base: Path, tenants: Any, /, **more: object) -> Config:
    """Parse a configuration with one listener, "lan", over TCP with CURVE."""
    lan = {"address": "tcp://*:5555", "security": "curve", "key": "listener.key", **more}
    tables = {"listeners": {"lan": lan}, "tenants": tenants, "models": {"m": {"path": "/m.onnx"}}}
    return parse(tables, base)


ANN = {"keys": ["ann.pub"]}


def test_listener_has_secret_and_allowed_tenant_keys(keys: Path) -> None:
    config = curve(keys, {"ann": ANN, "ben": {"uids": [1]}})
    lan = config.listeners["lan"]
    assert (lan.secret, allowed_keys(lan, config.tenants)) == (SECRET, (PUBLIC,))
    assert SECRET not in repr(config)
    config = curve(keys, {"ann": ANN, "default": {}})
    assert allowed_keys(config.listeners["lan"], config.tenants) is None
    config = curve(keys, {"ann": ANN, "default": {}}, tenants=["ann"])
    assert allowed_keys(config.listeners["lan"], config.tenants) == (PUBLIC,)


@pytest.mark.parametrize(
    ("more", "tenants", "problem"),
    [
        ({"key": ""}, {"ann": ANN}, "key: missing: security = "),
        ({"key": "none.key"}, {"ann": ANN}, "key: {}/none.key: No such file"),
        ({"key": "ann.pub"}, {"ann": ANN}, "key: {}/ann.pub: expected mode 0600 or 0400, got 0644"),
        ({"insecure": True}, {"ann": ANN}, 'insecure: expected false with security = "curve"'),
        ({"address": "ipc:///run/a"}, {"ann": ANN}, 'security: expected "none" for ipc://'),
        ({}, {"ben": {"uids": [1]}}, "security: no client could connect: "),
        ({}, {}, "security: no client could connect: "),
        ({"tenants": ["ben"]}, {"ann": ANN, "ben": {"uids": [1]}}, "security: no client could connect: "),
        (
            {"tenants": ["ann", "eve"]},
            {"ann": ANN},
            "tenants[1]: expected the name of a table [tenants.NAME], got str 'eve'",
        ),
        ({"security": "none"}, {"ann": ANN}, 'key: has no effect without security = "curve"'),
        ({"security": "none", "key": ""}, {"ann": ANN}, 'insecure: missing: expected security = "curve" with a key'),
        ({"security": "tls"}, {"ann": ANN}, "security: expected one of curve, none, got str 'tls'"),
    ],
)
def test_inconsistent_security_is_rejected(keys: Path, more: Any, tenants: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        curve(keys, tenants, **more)
    assert caught.value.problems[0].startswith(f"listeners.lan.{problem.format(keys)}")


def test_curve_listener_needs_pynacl(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        curve(keys, {"ann": ANN})
    expected = 'listeners.lan.security: "curve" needs PyNaCl, which is not installed: pip install "./weightd[daemon]"'
    assert caught.value.problems == (expected,)
