"""Listen sockets: one daemon per socket, long paths, and clients without permission."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.service import Service
from weightd import Client, PermissionDenied, Unavailable

from .support import BareEngine, DaemonPaths, SampleRequest, Zoo, ask_all, left_behind, pairs, weightd

pytestmark = pytest.mark.e2e

# The sockets do not depend on the engine.
ENGINE = "onnxruntime"
NOBODY = 65534
CANNOT_CREATE = 73


@pytest.fixture(scope="module")
def service(zoo: Zoo) -> Iterator[Service]:
    with Service({"two_inputs": {"path": zoo.path("two_inputs", ENGINE)}}) as service:
        service.ready()
        yield service


@pytest.fixture
def table(zoo: Zoo) -> dict[str, dict[str, object]]:
    return {"two_inputs": {"path": zoo.path("two_inputs", ENGINE)}}


@pytest.fixture
def questions(zoo: Zoo, bare: BareEngine) -> list[SampleRequest]:
    return bare.questions(zoo.path("two_inputs", ENGINE), pairs((2, 1)))


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with service.client() as client:
        yield client


def test_second_daemon_on_same_socket_exits(service: Service, client: Client, questions: list[SampleRequest]) -> None:
    before = left_behind(service.config.parent, service.cache)
    second = weightd("serve", service.config)
    assert second.returncode == CANNOT_CREATE
    assert f"pid {service.pid} " in second.stderr
    assert left_behind(service.config.parent, service.cache) == before
    ask_all(client, "two_inputs", questions)
    with service.client() as newcomer:
        ask_all(newcomer, "two_inputs", questions)


def test_second_daemon_on_same_port_exits(table: dict[str, dict[str, object]], place: DaemonPaths) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        done = weightd("serve", place.config(table, {"lan": address}))
    assert done.returncode == CANNOT_CREATE
    assert f"cannot listen on {address}: Address already in use" in done.stderr
    assert place.left == []


def test_longest_possible_socket_path(
    table: dict[str, dict[str, object]], place: DaemonPaths, questions: list[SampleRequest]
) -> None:
    path = place.runtime / ("x" * (107 - len(".unix") - len(str(place.runtime)) - 1))
    assert len(f"{path}.unix") == 107
    address = f"ipc://{path}"
    with place.serve(table, socket=address) as daemon:
        for each in (address, f"unix://{path}"):
            with daemon.client(each) as client:
                ask_all(client, "two_inputs", questions)
        assert daemon.end() == 0
    assert place.left == []


def test_listeners_replace_default_ipc_socket(
    table: dict[str, dict[str, object]], place: DaemonPaths, questions: list[SampleRequest]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    listeners = {"one": f"ipc://{place.runtime}/one.sock", "two": f"tcp://127.0.0.1:{port}"}
    with place.serve(table, listeners) as daemon:
        for address in (*listeners.values(), f"unix://{place.address}"):
            with daemon.client(address) as client:
                ask_all(client, "two_inputs", questions)
        assert not Path(place.address).exists()
        assert daemon.end() == 0
    assert place.left == []


_AS_NOBODY = f"""
import os, sys
from weightd import (Client, PermissionDenied)
if os.getuid() == 0:
    os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
try:
    Client(sys.argv[1])
except PermissionDenied as error:
    print(error.code, error)
"""


def as_nobody(address: str) -> str:
    """Connect as a user without permission; return the error."""
    command = [sys.executable, "-c", _AS_NOBODY, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout


@pytest.mark.parametrize("scheme", ["ipc://", "unix://", ""])
@pytest.mark.parametrize("barrier", ["socket", "directory"])
def test_client_without_permission_fails_at_once(
    barrier: str, scheme: str, service: Service, client: Client, questions: list[SampleRequest]
) -> None:
    path = Path(service.address)
    sockets = (path, Path(f"{path}.unix"))
    assert [each.stat().st_mode & 0o777 for each in sockets] == [0o660, 0o660]
    path.parent.chmod(0o755 if barrier == "socket" else 0o700)
    if os.getuid() != 0:
        for each in sockets if barrier == "socket" else [path.parent]:
            each.chmod(0)
    try:
        output = as_nobody(f"{scheme}{path}")
    finally:
        path.parent.chmod(0o700)
        for each in sockets:
            each.chmod(0o660)
    assert output.startswith("PERMISSION_DENIED ")
    assert str(path) in output
    ask_all(client, "two_inputs", questions)


def test_client_falls_back_to_zeromq(service: Service, questions: list[SampleRequest]) -> None:
    path = Path(service.address)
    unix = Path(f"{path}.unix")
    unix.rename(path.with_name("away"))
    try:
        with pytest.raises(Unavailable), Client(f"unix://{path}"):
            pass
        with Client(str(path)) as client:
            ask_all(client, "two_inputs", questions)
    finally:
        path.with_name("away").rename(unix)
    with Client(f"unix://{path}") as client:
        ask_all(client, "two_inputs", questions)


def test_reload_and_update_need_unix_socket(service: Service, zoo: Zoo) -> None:
    path = service.address
    with Client(f"ipc://{path}") as client:
        for operate in (client.reload, lambda: client.update("two_inputs", str(zoo.path("two_inputs", ENGINE)))):
            with pytest.raises(PermissionDenied):
                operate()
    with Client(path) as client:
        client.reload()


def test_start_fails_if_unix_socket_is_in_use(table: dict[str, dict[str, object]], place: DaemonPaths) -> None:
    path = f"{place.address}.unix"
    with socket.create_server(path, family=socket.AF_UNIX):
        done = weightd("serve", place.config(table))
    assert done.returncode == CANNOT_CREATE
    assert f"{path}: another program listens on this path" in done.stderr
    Path(path).unlink()
    assert place.left == []
