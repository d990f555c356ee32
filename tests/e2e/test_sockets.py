"""Where the daemon listens: one daemon to a socket, paths that are too long, and clients that may not connect."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.service import Service
from weightd.client import Client, InvalidArgument, Unavailable

from .support import Bare, Place, Question, Weightd, Zoo, ask_all, config_of, left_behind, pairs, runtime_of, weightd

pytestmark = pytest.mark.e2e

# What the socket does has nothing to do with the engine.
ENGINE = "onnxruntime"
NOBODY = 65534
CANNOT_CREATE = 73
BAD_CONFIG = 78


@pytest.fixture(scope="module")
def service(zoo: Zoo) -> Iterator[Service]:
    with Service({"two_inputs": {"path": zoo.path("two_inputs", ENGINE)}}) as service:
        service.ready()
        yield service


@pytest.fixture
def table(zoo: Zoo) -> dict[str, dict[str, object]]:
    return {"two_inputs": {"path": zoo.path("two_inputs", ENGINE)}}


@pytest.fixture
def questions(zoo: Zoo, bare: Bare) -> list[Question]:
    return bare.questions(zoo.path("two_inputs", ENGINE), pairs((2, 1)))


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with service.client() as client:
        yield client


def test_a_second_daemon_on_the_same_socket_names_the_first_and_does_it_no_harm(
    service: Service, client: Client, questions: list[Question]
) -> None:
    before = left_behind(runtime_of(service), service.cache)
    second = weightd("serve", config_of(service))
    assert second.returncode == CANNOT_CREATE
    assert f"pid {service.pid} " in second.stderr
    assert left_behind(runtime_of(service), service.cache) == before
    ask_all(client, "two_inputs", questions)
    with service.client() as newcomer:
        ask_all(newcomer, "two_inputs", questions)


def test_two_daemons_on_two_sockets_of_one_directory_do_each_other_no_harm(
    service: Service, client: Client, questions: list[Question], tmp_path: Path
) -> None:
    text = config_of(service).read_text("utf-8")
    config = tmp_path / "weightd.toml"
    config.write_text(text.replace("weightd.sock", "other.sock"), encoding="utf-8")
    before = left_behind(runtime_of(service), service.cache)
    with Weightd(tmp_path / "log", "serve", config) as second:
        with second.client(service.address.replace("weightd.sock", "other.sock")) as other:
            ask_all(other, "two_inputs", questions)
            assert other.status().pid == second.pid
        os.kill(second.pid, 15)
        assert second.wait() == 0
    assert left_behind(runtime_of(service), service.cache) == before
    ask_all(client, "two_inputs", questions)


def test_a_second_daemon_on_the_same_port_is_refused(table: dict[str, dict[str, object]], place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        done = weightd("serve", place.config(table, socket=address))
    assert done.returncode == CANNOT_CREATE
    assert f"cannot listen on {address}: Address already in use" in done.stderr
    assert place.left == []


def test_clients_may_connect_by_tcp(
    table: dict[str, dict[str, object]], place: Place, questions: list[Question], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with Weightd(tmp_path / "log", "serve", place.config(table, socket=address)) as daemon:
        with daemon.client(address) as client:
            ask_all(client, "two_inputs", questions)
        os.kill(daemon.pid, 15)
        assert daemon.wait() == 0
    assert place.left == []


def test_what_is_no_socket_is_not_removed(table: dict[str, dict[str, object]], place: Place) -> None:
    path = place.runtime / "weightd.sock"
    path.write_text("precious", encoding="utf-8")
    done = weightd("serve", place.config(table))
    assert done.returncode == CANNOT_CREATE
    assert f"{path}: expected a socket or nothing there" in done.stderr
    assert path.read_text("utf-8") == "precious"


def long_path(size: int) -> str:
    path = "/tmp/" + "x" * size
    return path[:size]


def test_a_socket_path_of_108_bytes_is_a_wrong_configuration(table: dict[str, dict[str, object]], place: Place) -> None:
    path = long_path(108)
    for command in ("serve", "check"):
        done = weightd(command, place.config(table, socket=f"ipc://{path}"))
        assert done.returncode == BAD_CONFIG
        assert "daemon.socket: expected a socket path of at most 107 bytes, got 108" in done.stderr
        assert path in done.stderr


def test_a_runtime_directory_whose_sockets_would_be_too_long_is_a_wrong_configuration(
    table: dict[str, dict[str, object]], place: Place
) -> None:
    done = weightd("serve", place.config(table, runtime_dir=long_path(100)))
    assert done.returncode == BAD_CONFIG
    assert "daemon.runtime_dir: expected a socket path of at most 107 bytes" in done.stderr


def test_a_client_refuses_a_socket_path_of_108_bytes() -> None:
    with pytest.raises(InvalidArgument, match="at most 107 bytes, got 108"):
        Client(f"ipc://{long_path(108)}")


def test_a_socket_path_of_107_bytes_works(
    table: dict[str, dict[str, object]], place: Place, questions: list[Question], tmp_path: Path
) -> None:
    path = place.runtime / ("x" * (107 - len(str(place.runtime)) - 1))
    assert len(str(path)) == 107
    address = f"ipc://{path}"
    with Weightd(tmp_path / "log", "serve", place.config(table, socket=address)) as daemon:
        with daemon.client(address) as client:
            ask_all(client, "two_inputs", questions)
        os.kill(daemon.pid, 15)
        assert daemon.wait() == 0
    assert place.left == []


def test_a_client_says_at_once_that_nobody_listens(place: Place) -> None:
    with pytest.raises(Unavailable, match="there is no socket"):
        Client(place.address)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(place.address.removeprefix("ipc://"))
    with pytest.raises(Unavailable, match="nobody listens"):
        Client(place.address)


_AS_NOBODY = f"""
import os, sys
from weightd.client import (Client, PermissionDenied)
if os.getuid() == 0:
    os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
try:
    Client(sys.argv[1])
except PermissionDenied as error:
    print(error.code, error)
"""


def as_nobody(address: str) -> str:
    """Connect as a user who may not, and return the error."""
    command = [sys.executable, "-c", _AS_NOBODY, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout


@pytest.mark.parametrize("barrier", ["socket", "directory"])
def test_a_client_without_permission_says_so_at_once(
    barrier: str, service: Service, client: Client, questions: list[Question]
) -> None:
    path = Path(service.address.removeprefix("ipc://"))
    assert path.stat().st_mode & 0o777 == 0o660
    path.parent.chmod(0o755 if barrier == "socket" else 0o700)
    if os.getuid() != 0:
        (path if barrier == "socket" else path.parent).chmod(0)
    try:
        said = as_nobody(service.address)
    finally:
        path.parent.chmod(0o700)
        path.chmod(0o660)
    assert said.startswith("PERMISSION_DENIED ")
    assert str(path) in said
    ask_all(client, "two_inputs", questions)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_a_daemon_that_may_not_write_its_directories_says_which(
    table: dict[str, dict[str, object]], place: Place
) -> None:
    place.runtime.chmod(0o755)
    command = [sys.executable, "-c", _DAEMON_AS_NOBODY, str(place.config(table))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == CANNOT_CREATE
    assert f"{place.runtime}" in done.stderr


_DAEMON_AS_NOBODY = f"""
import encodings.utf_8_sig, os, sys  # nobody may read this interpreter's files
from weightd.daemon.__main__ import main
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
sys.exit(main(["serve", sys.argv[1]]))
"""
