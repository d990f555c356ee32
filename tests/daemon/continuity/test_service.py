"""The service manager's protocol, over real datagram sockets, and in a process of its own where descriptors pass."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weightd.daemon.continuity.service import CLIENTS, KEEPER, Manager

# Puts a pipe where a service manager puts descriptors, and tells what becomes of it.
_SERVICE = """
import json, os, sys
from weightd.daemon.continuity.service import Manager
read, write = os.pipe()
free = os.dup2(read, 100), os.dup2(write, 101)
os.dup2(free[0], 3), os.dup2(free[1], 4)
os.environ.update(json.loads(sys.argv[1]))
if os.environ.get("LISTEN_PID") == "own":
    os.environ["LISTEN_PID"] = str(os.getpid())
inherited = Manager(os.environ).inherited
left = [name for name in os.environ if name.startswith(("LISTEN_", "WATCHDOG_", "NOTIFY_"))]
print(json.dumps([inherited, [os.get_inheritable(each) for each in (3, 4)], left]))
"""


@pytest.fixture(params=["path", "abstract"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "notify") if request.param == "path" else f"\0weightd-test-{os.getpid()}")
        made.settimeout(20.0)
        yield made


@pytest.fixture
def manager(listener: socket.socket) -> Manager:
    name = listener.getsockname()
    return Manager({"NOTIFY_SOCKET": name if isinstance(name, str) else f"@{name[1:].decode()}"})


def received(listener: socket.socket) -> list[str]:
    return listener.recv(65536).decode().split("\n")


# --- telling --------------------------------------------------------------------------------------------------------


def test_where_nobody_is_nothing_happens() -> None:
    manager = Manager({})
    assert (manager.there, manager.watchdog, manager.inherited) == (False, None, {})
    manager.notify("READY=1")
    manager.reloading()
    manager.keep(KEEPER, 0)
    manager.drop(KEEPER)
    assert not Manager({"NOTIFY_SOCKET": ""}).there


def test_it_is_told_in_one_datagram(manager: Manager, listener: socket.socket) -> None:
    assert manager.there
    manager.notify("READY=1", "STATUS=two models")
    manager.notify("STOPPING=1")
    assert received(listener) == ["READY=1", "STATUS=two models"]
    assert received(listener) == ["STOPPING=1"]


def test_a_reload_tells_when_it_began(manager: Manager, listener: socket.socket) -> None:
    before = time.monotonic_ns() // 1000
    manager.reloading()
    first, second = received(listener)
    name, _, microseconds = second.partition("=")
    assert (first, name) == ("RELOADING=1", "MONOTONIC_USEC")
    assert before <= int(microseconds) <= time.monotonic_ns() // 1000


def test_a_descriptor_is_kept_in_place_of_any_other_of_its_name(manager: Manager, listener: socket.socket) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        manager.keep(KEEPER, ours.fileno())
        assert received(listener) == ["FDSTOREREMOVE=1", "FDNAME=keeper"]
        message, descriptors, _, _ = socket.recv_fds(listener, 65536, 4)
        assert message.decode().split("\n") == ["FDSTORE=1", "FDNAME=keeper"]
        [descriptor] = descriptors
        assert os.path.sameopenfile(descriptor, ours.fileno())
        os.close(descriptor)
        os.fstat(ours.fileno())


def test_what_is_kept_can_be_dropped(manager: Manager, listener: socket.socket) -> None:
    manager.drop(KEEPER)
    assert received(listener) == ["FDSTOREREMOVE=1", "FDNAME=keeper"]


def test_a_socket_that_is_gone_is_no_concern(tmp_path: Path) -> None:
    manager = Manager({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    manager.notify("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
    manager.notify("READY=1")
    manager.keep(KEEPER, 0)
    Manager({"NOTIFY_SOCKET": "/x" * 100}).notify("READY=1")


def test_a_socket_that_is_full_keeps_nobody(manager: Manager, listener: socket.socket) -> None:
    sent = 5000
    for number in range(sent):
        manager.notify(f"STATUS={number} {'x' * 1000}")
    manager.notify("READY=1")
    listener.setblocking(False)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while received(listener):
            count += 1
    assert 0 < count < sent
    # What it could not be told is told with the next notification, as it is by then.
    manager.notify("WATCHDOG=1")
    assert received(listener) == [f"STATUS={sent - 1} {'x' * 1000}", "READY=1", "WATCHDOG=1"]
    manager.notify()
    with pytest.raises(BlockingIOError):
        received(listener)


def test_a_descriptor_that_cannot_be_kept_is_told_of(
    manager: Manager, listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("weightd.daemon.continuity.service._PATIENCE_S", 0.05)
    for _ in range(5000):
        manager.notify("STATUS=" + "x" * 1000)
    manager.keep(KEEPER, listener.fileno())
    assert "does not hold keeper: a restart will not go on with that" in caplog.text


# --- what it wants --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "watchdog"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": ""}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": ""}, None),
        ({"WATCHDOG_USEC": "-1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_a_sign_of_life_is_expected_of_this_process_alone(given: dict[str, str], watchdog: float | None) -> None:
    assert Manager(given).watchdog == watchdog


def test_children_do_not_see_what_concerns_the_daemon() -> None:
    environment = {
        "NOTIFY_SOCKET": "/notify",
        "WATCHDOG_USEC": "1",
        "WATCHDOG_PID": "1",
        "LISTEN_FDS": "1",
        "LISTEN_PID": "1",
        "LISTEN_FDNAMES": "a",
        "LISTENER": "ours",
    }
    Manager(environment)
    assert environment == {"LISTENER": "ours"}


# --- what it passes -------------------------------------------------------------------------------------------------


def service(**variables: str) -> tuple[Any, Any]:
    """Return what is inherited, and which of descriptors 3 and 4 a child would inherit."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _SERVICE, json.dumps(variables)]
    inherited, inheritable, left = json.loads(subprocess.check_output(command, env=environment, timeout=60))
    assert left == []
    return inherited, inheritable


def test_descriptors_are_told_by_their_names() -> None:
    inherited, inheritable = service(LISTEN_PID="own", LISTEN_FDS="2", LISTEN_FDNAMES="weightd.socket:keeper")
    assert inherited == {CLIENTS: [3], KEEPER: [4]}
    assert inheritable == [False, False]


@pytest.mark.parametrize(
    "names", [{}, {"LISTEN_FDNAMES": ""}, {"LISTEN_FDNAMES": "clients"}, {"LISTEN_FDNAMES": "unknown:stored"}]
)
def test_what_has_no_known_name_is_for_clients(names: dict[str, str]) -> None:
    inherited, inheritable = service(LISTEN_PID="own", LISTEN_FDS="2", **names)
    assert inherited == {CLIENTS: [3, 4]}
    assert inheritable == [False, False]


def test_only_as_many_as_were_passed_are_touched() -> None:
    assert service(LISTEN_PID="own", LISTEN_FDS="1", LISTEN_FDNAMES="keeper:x") == ({KEEPER: [3]}, [False, True])


@pytest.mark.parametrize(
    "variables",
    [
        {"LISTEN_PID": "1", "LISTEN_FDS": "2"},
        {"LISTEN_FDS": "2"},
        {"LISTEN_PID": "own"},
        {"LISTEN_PID": "own", "LISTEN_FDS": "0"},
        {"LISTEN_PID": "own", "LISTEN_FDS": "-1"},
        {"LISTEN_PID": "own", "LISTEN_FDS": "two"},
    ],
)
def test_what_was_passed_to_another_process_or_not_at_all_is_left_alone(variables: dict[str, str]) -> None:
    assert service(**variables) == ({}, [True, True])
