from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import List

import pytest

from testkit.fakedaemon import LIMIT_S, FakeDaemon
from weightd.client import Client, InvalidArgument, Unavailable
from weightd.client.address import check, default_address
from weightd.shared import paths

# Connects as nobody, after all imports: what is installed need not be readable for nobody.
_AS_NOBODY = """
import os, sys
from weightd.client import (Client, WeightdError)
child = os.fork()
if child == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    try:
        Client(sys.argv[1], timeout=20).server()
    except WeightdError as error:
        print(getattr(error, "code", type(error).__name__), error, flush=True)
        os._exit(0)
    print("connected", flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def as_nobody(address: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _AS_NOBODY, address],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        timeout=LIMIT_S,
        check=True,
    )
    return done.stdout.decode().strip()


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")


@needs_root
def test_permission_on_the_socket(daemon: FakeDaemon, directory: Path) -> None:
    directory.chmod(0o755)
    path = directory / "d.sock"
    path.chmod(0o660)
    said = as_nobody(daemon.address)
    assert said.startswith("PERMISSION_DENIED this user may not connect to")
    assert "membership" in said
    path.chmod(0o666)
    assert as_nobody(daemon.address) == "connected"


@needs_root
def test_permission_on_the_directory(daemon: FakeDaemon, directory: Path) -> None:
    directory.chmod(0o700)
    assert as_nobody(daemon.address).startswith("PERMISSION_DENIED")


def test_no_socket(address: str) -> None:
    with pytest.raises(Unavailable, match="there is no socket; start it with `weightd serve"):
        Client(address)


def test_a_socket_that_a_killed_daemon_left(directory: Path, address: str) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(directory / "d.sock"))
        stale.listen(1)
    with pytest.raises(Unavailable, match="nobody listens on the socket"):
        Client(address)


def test_a_path_of_more_bytes_than_a_socket_can_have() -> None:
    longest = "/" + "x" * 106
    with pytest.raises(Unavailable, match="there is no socket"):
        check(f"ipc://{longest}")
    with pytest.raises(InvalidArgument, match="at most 107 bytes, got 108"):
        check(f"ipc://{longest}x")
    with pytest.raises(InvalidArgument, match="got 109"):
        check("ipc://" + longest[:-1] + "ü" + "x")


def test_a_file_that_is_no_socket(directory: Path) -> None:
    (directory / "file").write_text("")
    with pytest.raises(InvalidArgument, match="is not a socket of weightd"):
        check(f"ipc://{directory}/file")
    with pytest.raises(InvalidArgument, match="is not a socket of weightd"):
        check(f"ipc://{directory}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(str(directory / "dgram"))
        with pytest.raises(InvalidArgument, match="is not a socket of weightd"):
            check(f"ipc://{directory}/dgram")


def test_a_path_through_a_file(directory: Path) -> None:
    (directory / "file").write_text("")
    with pytest.raises((Unavailable, InvalidArgument)):
        check(f"ipc://{directory}/file/d.sock")


def test_a_full_backlog_is_somebody(directory: Path) -> None:
    path = str(directory / "d.sock")
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(path)
        busy.listen(0)
        waiting: List[socket.socket] = []
        try:
            while True:
                one = socket.socket(socket.AF_UNIX)
                one.setblocking(False)
                waiting.append(one)
                one.connect(path)
        except BlockingIOError:
            check(f"ipc://{path}")
        finally:
            for one in waiting:
                one.close()


@pytest.mark.parametrize(
    "address",
    ["", "/run/weightd.sock", "ipc://", "ipc://relative", "ipc://@abstract", "ipc:///a\0b", "inproc://x", "tcp://",
     "tcp://host", "tcp://host:", "tcp://host:port", "tcp://:1", "http://host:80",
     "tcp://127.0.0.1:0", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:99999", "tcp://[::1]:99999", "tcp://host:\u0661"],
)  # fmt: skip
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(InvalidArgument, match="expected an address"):
        Client(address)


def test_what_libzmq_refuses_is_no_address() -> None:
    with pytest.raises(InvalidArgument, match=r"tcp://a\?b:1: Invalid argument"):
        Client("tcp://a?b:1", timeout=LIMIT_S)


def test_where_nobody_can_answer() -> None:
    with pytest.raises(Unavailable, match="nobody answers there"):
        Client("tcp://no-such-host.invalid:1", timeout=LIMIT_S)


def test_what_listens_on_tcp_and_is_no_weightd() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)

        def hang_up() -> None:
            listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(Unavailable, match="hung up"):
            Client(f"tcp://127.0.0.1:{listener.getsockname()[1]}", timeout=LIMIT_S)
        thread.join()


# --- where it is by default -----------------------------------------------------------------------------------------


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Path:
    """A machine without a daemon; this user is not root, and has a runtime directory."""
    for variable in ("WEIGHTD_SOCKET", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(paths, "SYSTEM_RUNTIME_DIR", str(directory / "system"))
    monkeypatch.setattr(paths, "runtime_dir", lambda: str(directory / "own"))
    return directory


def test_the_environment_decides(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTD_SOCKET", "tcp://there:1")
    assert default_address() == "tcp://there:1"


def test_an_empty_variable_is_no_address(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTD_SOCKET", "")
    assert default_address() == f"ipc://{nowhere}/own/weightd.sock"


def test_ones_own_daemon_comes_before_the_systems(nowhere: Path) -> None:
    (nowhere / "system").mkdir()
    assert default_address() == f"ipc://{nowhere}/system/weightd.sock"
    (nowhere / "own").mkdir()
    assert default_address() == f"ipc://{nowhere}/system/weightd.sock"
    (nowhere / "own" / "weightd.sock").write_text("")
    assert default_address() == f"ipc://{nowhere}/own/weightd.sock"


@needs_root
def test_another_users_directory_is_not_trusted(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (nowhere / "own").mkdir()
    (nowhere / "own" / "weightd.sock").write_text("")
    shutil.chown(nowhere / "own", 12345)
    assert default_address() == f"ipc://{nowhere}/system/weightd.sock"


def test_where_a_users_daemon_has_its_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert paths.runtime_dir() == "/run/user/1000/weightd"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert paths.runtime_dir() == "/tmp/weightd-1000"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    assert paths.runtime_dir() == "/tmp/weightd-1000"
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert paths.runtime_dir() == "/run/weightd"
