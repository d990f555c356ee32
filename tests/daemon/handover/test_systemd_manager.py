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

import pytest

from weightd_daemon.handover.systemd_manager import CLIENTS, CONFIG, SHIM, ServiceManager

# Puts a pipe where a service manager puts descriptors, and tells what becomes of it, for each row of variables.
_SERVICE = """
import json, os, sys
from weightd_daemon.handover.systemd_manager import ServiceManager
read, write = os.pipe()
free = os.dup2(read, 100), os.dup2(write, 101)
for row in json.loads(sys.argv[1]):
    os.dup2(free[0], 3), os.dup2(free[1], 4)
    os.environ.update({**row, "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "NOTIFY_SOCKET": "/notify"})
    if os.environ.get("LISTEN_PID") == "own":
        os.environ["LISTEN_PID"] = str(os.getpid())
    inherited = ServiceManager(os.environ).inherited
    left = [name for name in os.environ if name.startswith(("LISTEN_", "WATCHDOG_", "NOTIFY_"))]
    print(json.dumps([inherited, [os.get_inheritable(each) for each in (3, 4)], left]))
"""

_LISTENS = """
import socket
one, other = socket.socket(socket.AF_UNIX), socket.socketpair()[0].detach()
one.bind("")
one.listen()
read, write = one.fileno(), other
"""


@pytest.fixture(params=["path", "abstract"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "notify") if request.param == "path" else f"\0weightd-test-{os.getpid()}")
        made.settimeout(20.0)
        yield made


@pytest.fixture
def manager(listener: socket.socket) -> ServiceManager:
    name = listener.getsockname()
    return ServiceManager({"NOTIFY_SOCKET": name if isinstance(name, str) else f"@{name[1:].decode()}"})


def received(listener: socket.socket) -> list[str]:
    return listener.recv(65536).decode().split("\n")


# --- telling --------------------------------------------------------------------------------------------------------


def test_where_nobody_is_nothing_happens() -> None:
    manager = ServiceManager({})
    assert (manager.is_present, manager.watchdog_s, manager.inherited) == (False, None, {})
    manager.notify("READY=1")
    manager.notify_reloading()
    manager.store_descriptor(SHIM, 0)
    manager.remove_descriptor(SHIM)
    assert not ServiceManager({"NOTIFY_SOCKET": ""}).is_present


def test_each_time_it_is_told_in_one_datagram(manager: ServiceManager, listener: socket.socket) -> None:
    assert manager.is_present
    manager.notify("READY=1", "STATUS=two models")
    manager.remove_descriptor(SHIM)
    assert received(listener) == ["READY=1", "STATUS=two models"]
    assert received(listener) == ["FDSTOREREMOVE=1", "FDNAME=shim"]


def test_a_reload_tells_when_it_began(manager: ServiceManager, listener: socket.socket) -> None:
    before = time.monotonic_ns() // 1000
    manager.notify_reloading()
    first, second = received(listener)
    name, _, microseconds = second.partition("=")
    assert (first, name) == ("RELOADING=1", "MONOTONIC_USEC")
    assert before <= int(microseconds) <= time.monotonic_ns() // 1000


def test_a_descriptor_is_kept_in_place_of_any_other_of_its_name(
    manager: ServiceManager, listener: socket.socket
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        manager.store_descriptor(SHIM, ours.fileno())
        assert received(listener) == ["FDSTOREREMOVE=1", "FDNAME=shim"]
        message, descriptors, _, _ = socket.recv_fds(listener, 65536, 4)
        assert message.decode().split("\n") == ["FDSTORE=1", "FDNAME=shim"]
        [descriptor] = descriptors
        assert os.path.sameopenfile(descriptor, ours.fileno())
        os.close(descriptor)
        os.fstat(ours.fileno())


def test_a_socket_that_is_gone_is_no_concern(tmp_path: Path) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    manager.notify("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
    manager.notify("READY=1")
    manager.store_descriptor(SHIM, 0)
    ServiceManager({"NOTIFY_SOCKET": "/x" * 100}).notify("READY=1")


def test_a_socket_that_is_full_keeps_nobody(
    manager: ServiceManager, listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("weightd_daemon.handover.systemd_manager.SEND_TIMEOUT_S", 0.05)
    sent = 1000
    for number in range(sent):
        manager.notify(f"STATUS={number} {'x' * 1000}")
    manager.notify("READY=1")
    manager.store_descriptor(SHIM, listener.fileno())
    assert "does not hold shim: a restart will not go on with that" in caplog.text
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


# --- what it wants --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "watchdog"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": ""}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_a_sign_of_life_is_expected_of_this_process_alone(given: dict[str, str], watchdog: float | None) -> None:
    assert ServiceManager(given).watchdog_s == watchdog


# --- what it passes -------------------------------------------------------------------------------------------------


def test_what_was_passed_is_told_by_its_name_and_what_was_not_is_left_alone() -> None:
    names, own = "LISTEN_FDNAMES", {"LISTEN_PID": "own", "LISTEN_FDS": "2"}
    alone: tuple[dict[str, list[int]], list[bool]] = ({}, [True, True])
    table = [
        ({**own, names: "weightd.socket:shim"}, ({CLIENTS: [3], SHIM: [4]}, [False, False])),
        # What has no known name is for clients.
        (own, ({CLIENTS: [3, 4]}, [False, False])),
        ({**own, names: ""}, ({CLIENTS: [3, 4]}, [False, False])),
        ({**own, names: "clients"}, ({CLIENTS: [3, 4]}, [False, False])),
        ({**own, names: "unknown:stored"}, ({CLIENTS: [3, 4]}, [False, False])),
        ({**own, "LISTEN_FDS": "1", names: "shim:x"}, ({SHIM: [3]}, [False, True])),
        # Passed to another process, or not at all.
        ({"LISTEN_PID": "1", "LISTEN_FDS": "2"}, alone),
        ({"LISTEN_FDS": "2"}, alone),
        ({"LISTEN_PID": "own"}, alone),
        *(({**own, "LISTEN_FDS": count}, alone) for count in ("0", "-1", "two")),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _SERVICE, json.dumps([variables for variables, _ in table])]
    said = subprocess.check_output(command, env=environment, timeout=60).splitlines()
    assert len(said) == len(table)
    for (variables, (inherited, inheritable)), line in zip(table, said, strict=True):
        # Children do not see what concerns the daemon.
        assert (variables, json.loads(line)) == (variables, [inherited, inheritable, []])


def test_where_somebody_listens_is_for_clients_whatever_its_name() -> None:
    for wrong in (SHIM, CONFIG):
        variables = {"LISTEN_PID": "own", "LISTEN_FDS": "2", "LISTEN_FDNAMES": f"{wrong}:{wrong}"}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        program = _SERVICE.replace("read, write = os.pipe()", _LISTENS)
        command = [sys.executable, "-c", program, json.dumps([variables])]
        [said] = subprocess.check_output(command, env=environment, timeout=60).splitlines()
        assert json.loads(said)[0] == {CLIENTS: [3], wrong: [4]}
