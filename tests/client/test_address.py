from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Iterator, List, Type
from unittest.mock import Mock

import pytest

from testkit.fakedaemon import LIMIT_S, FakeDaemon
from weightd import AsyncClient, Client, DeadlineExceeded, InvalidArgument, PermissionDenied, Unavailable
from weightd.address import Address, check_reachable, connect_unix, default_addresses, parse_address, read_keys
from weightd_common import endpoints

# Connects as the user "nobody" after all imports, because this user may be unable to read the installation.
_CONNECT_AS_OTHER_USER = """
import os, sys
from weightd import Client, WeightdError
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for address in sys.argv[1:]:
    try:
        Client(address, timeout=20).close()
        print("connected")
    except WeightdError as error:
        print(error.code, error)
"""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")


@needs_root
def test_permissions_of_socket_and_directory(directory: Path) -> None:
    directory.chmod(0o755)
    (directory / "closed").mkdir(mode=0o700)
    names = ["group", "all", "closed/all"]
    daemons = [FakeDaemon(f"{scheme}://{directory}/{name}") for scheme in ("ipc", "unix") for name in names]
    for name, mode in zip(names, (0o660, 0o666, 0o666)):
        for suffix in ("", ".unix"):
            (directory / (name + suffix)).chmod(mode)
    done = subprocess.run(
        [sys.executable, "-c", _CONNECT_AS_OTHER_USER, *(each.address for each in daemons)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        timeout=LIMIT_S,
        check=True,
    )
    for each in daemons:
        each.stop()
    for group, everybody, closed in zip(*[iter(done.stdout.decode().splitlines())] * 3):
        assert group.startswith("PERMISSION_DENIED this user may not connect to")
        assert "add the user to the socket's group" in group
        assert everybody == "connected"
        assert closed.startswith("PERMISSION_DENIED")


@pytest.mark.parametrize(
    ("name", "error", "expected"),
    [
        ("nothing", Unavailable, "there is no socket; start it with `weightd serve"),
        ("stale", Unavailable, "no process listens on the socket"),
        ("file", InvalidArgument, "is not a socket of weightd"),
        ("", InvalidArgument, "is not a socket of weightd"),
        ("datagrams", InvalidArgument, "is not a socket of weightd"),
        ("file/d.sock", InvalidArgument, "is not a socket of weightd"),
    ],
)
def test_address_without_a_daemon(directory: Path, name: str, error: Type[Exception], expected: str) -> None:
    (directory / "file").write_text("")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(directory / "stale"))
        stale.listen(1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(str(directory / "datagrams"))
        with pytest.raises(error, match=expected):
            check_reachable(f"ipc://{directory}/{name}")


def test_removed_socket_is_not_another_file(directory: Path) -> None:
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    with pytest.raises(Unavailable, match="no process listens on the socket"):
        connect_unix(Mock(**{"connect.side_effect": refused}), f"{directory}/d.sock")


def test_limits_length_of_socket_path() -> None:
    with pytest.raises(Unavailable, match="there is no socket"):
        check_reachable("ipc:///" + "x" * 106)
    with pytest.raises(InvalidArgument, match="at most 107 bytes, got 108"):
        check_reachable("ipc:///" + "x" * 105 + "ü")


def test_full_backlog_counts_as_a_listener(directory: Path) -> None:
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
            check_reachable(f"ipc://{path}")
        finally:
            for one in waiting:
                one.close()


@pytest.mark.parametrize(
    "address",
    ["", "run/weightd.sock", "/a\0b", "unix://", "unix://relative", "unix://@abstract",
     "ipc://", "ipc://relative", "ipc://@abstract", "ipc:///a\0b", "inproc://x", "tcp://",
     "tcp://host", "tcp://host:", "tcp://host:port", "tcp://:1", "http://host:80",
     "tcp://127.0.0.1:0", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:99999", "tcp://[::1]:99999", "tcp://host:\u0661"],
)  # fmt: skip
def test_rejects_invalid_address(address: str) -> None:
    with pytest.raises(InvalidArgument, match="expected an address"):
        Client(address)


def test_rejects_address_that_libzmq_rejects() -> None:
    with pytest.raises(InvalidArgument, match=r"tcp://a\?b:1: Invalid argument"):
        Client("tcp://a?b:1", timeout=LIMIT_S)


def test_unreachable_host() -> None:
    with pytest.raises(Unavailable, match="no response"):
        Client("tcp://no-such-host.invalid:1", timeout=LIMIT_S)


def test_tcp_listener_of_another_program() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)

        def hang_up() -> None:
            listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(Unavailable, match="closed the connection"):
            Client(f"tcp://127.0.0.1:{listener.getsockname()[1]}", timeout=LIMIT_S)
        thread.join()


# --- choice of the transport ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "unix", "zeromq"),
    [
        ("/run/d.sock", "/run/d.sock.unix", "ipc:///run/d.sock"),
        ("/run/d.sock.unix", "/run/d.sock.unix", "ipc:///run/d.sock"),
        ("unix:///run/d.sock", "/run/d.sock.unix", ""),
        ("unix:///run/d.sock.unix", "/run/d.sock.unix", ""),
        ("ipc:///run/d.sock", "", "ipc:///run/d.sock"),
        ("tcp://[::1]:5", "", "tcp://[::1]:5"),
    ],
)
def test_address_determines_transports(given: str, unix: str, zeromq: str) -> None:
    assert parse_address(given) == Address(given, unix, zeromq)


def test_address_without_scheme_prefers_unix_socket(directory: Path) -> None:
    given = f"{directory}/d.sock"
    with pytest.raises(Unavailable, match=rf"no daemon at {given}: there is no socket; start it with"):
        Client(given)
    zeromq = FakeDaemon(f"ipc://{given}")
    with Client(given, timeout=LIMIT_S) as client:
        assert (client.address, client.transport) == (given, "zmq")
        unix = FakeDaemon(f"unix://{given}")
        zeromq.stop()
        # After a lost connection the client finds the daemon over the other transport.
        while client.transport == "zmq":
            with suppress(Unavailable):
                client.server()
    unix.stop()
    stale = f"{directory}/other.sock"
    (directory / "other.sock.unix").write_text("")
    zeromq = FakeDaemon(f"ipc://{stale}")
    with Client(stale, timeout=LIMIT_S) as client:
        assert client.transport == "zmq"
    zeromq.stop()
    with pytest.raises(InvalidArgument, match="is not a socket of weightd"):
        Client(f"unix://{stale}")


def test_reports_missing_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str) -> Any:
        raise PermissionDenied("may not")

    monkeypatch.setattr("weightd.session.unix_connect_steps", refused)
    with pytest.raises(PermissionDenied, match="may not"):
        Client("/nowhere/d.sock")


# --- default addresses ----------------------------------------------------------------------------------------------


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Path:
    """Prepare a machine without a daemon; the empty environment variable counts as unset."""
    monkeypatch.setenv("WEIGHTD_SOCKET", "")
    monkeypatch.setattr(endpoints, "SYSTEM_RUNTIME_DIR", str(directory / "system"))
    monkeypatch.setattr(endpoints, "runtime_dir", lambda: str(directory / "own"))
    return directory


def leave_stale_socket(path: Path) -> None:
    """Leave a socket file, as a killed process does."""
    path.parent.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        bound.listen(1)


def leave_stale_sockets(directory: Path) -> None:
    for name in ("weightd.sock", "weightd.sock.unix"):
        leave_stale_socket(directory / name)


@pytest.fixture
def system(nowhere: Path) -> Iterator[FakeDaemon]:
    """Return the system's daemon; the user's daemon was killed and has left its socket files."""
    leave_stale_sockets(nowhere / "own")
    (nowhere / "system").mkdir()
    daemon = FakeDaemon(f"unix://{nowhere}/system/weightd.sock")
    yield daemon
    daemon.stop()


def test_default_addresses(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, system = f"{nowhere}/own/weightd.sock", f"{nowhere}/system/weightd.sock"
    assert default_addresses() == [own, system]
    monkeypatch.setattr(endpoints, "runtime_dir", lambda: str(nowhere / "system"))
    assert default_addresses() == [system]
    monkeypatch.setenv("WEIGHTD_SOCKET", "tcp://there:1")
    assert default_addresses() == ["tcp://there:1"]


@needs_root
def test_ignores_directory_of_another_user(nowhere: Path) -> None:
    (nowhere / "own").mkdir()
    shutil.chown(nowhere / "own", 12345)
    assert default_addresses() == [f"{nowhere}/system/weightd.sock"]


def test_skips_stale_socket_of_user_daemon(system: FakeDaemon, nowhere: Path) -> None:
    with Client(timeout=LIMIT_S) as client:
        assert (client.address, client.server().name) == (f"{nowhere}/system/weightd.sock", "fake")

    async def name() -> str:
        async with AsyncClient(timeout=LIMIT_S) as client:
            return (await client.server()).name

    assert asyncio.run(name()) == "fake"


@pytest.mark.parametrize("scheme", ["unix", "ipc"])
def test_prefers_user_daemon(system: FakeDaemon, nowhere: Path, scheme: str) -> None:
    for path in (nowhere / "own").iterdir():
        path.unlink()
    own = FakeDaemon(f"{scheme}://{nowhere}/own/weightd.sock")
    with Client(timeout=LIMIT_S) as client:
        assert client.address == f"{nowhere}/own/weightd.sock"
        own.stop()
        # The system's daemon listens, but a client does not change to another daemon.
        with pytest.raises(Unavailable):
            client.server()
        with pytest.raises(Unavailable, match=f"no daemon at {nowhere}/own/weightd.sock: [^/]*$"):
            client.server()


def test_waits_for_busy_user_daemon(system: FakeDaemon, nowhere: Path) -> None:
    path = nowhere / "own" / "weightd.sock.unix"
    path.unlink()
    with contextlib.ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(str(path))
        busy.listen(0)
        with suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(str(path))
        with pytest.raises(DeadlineExceeded, match=rf"handshake with {nowhere}/own/.* timed out"):
            Client(timeout=0.05)


def test_explicit_address_has_no_fallback(system: FakeDaemon, nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = f"{nowhere}/own/weightd.sock"
    with pytest.raises(Unavailable, match=f"no daemon at {given}: no process listens"):
        Client(given)
    monkeypatch.setenv("WEIGHTD_SOCKET", given)
    with pytest.raises(Unavailable, match=f"no daemon at {given}: no process listens"):
        Client()


def test_error_names_all_addresses(nowhere: Path) -> None:
    leave_stale_sockets(nowhere / "own")
    with pytest.raises(Unavailable) as raised:
        Client()
    assert str(raised.value).startswith(
        f"no daemon at {nowhere}/own/weightd.sock: no process listens on the socket, and none at "
        f"{nowhere}/system/weightd.sock: there is no socket; start it with `weightd serve"
    )
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


@pytest.mark.parametrize(
    ("uid", "runtime", "expected"),
    [
        (1000, "/run/user/1000", "/run/user/1000/weightd"),
        (1000, "relative", "/tmp/weightd-1000"),
        (1000, "", "/tmp/weightd-1000"),
        (0, "", "/run/weightd"),
    ],
)
def test_runtime_directory_of_user(monkeypatch: pytest.MonkeyPatch, uid: int, runtime: str, expected: str) -> None:
    monkeypatch.setattr(os, "getuid", lambda: uid)
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    assert endpoints.runtime_dir() == expected


ADDRESS = "tcp://127.0.0.1:1"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    made = tmp_path / "ann"
    subprocess.run([sys.executable, "-m", "weightctl", "keygen", str(made)], check=True, stdout=subprocess.DEVNULL)
    return Path(f"{made}.key"), Path(f"{made}.pub")


def test_reads_keys_and_hides_the_secret_key(pair: tuple[Path, Path]) -> None:
    secret, public = pair
    keys = read_keys(secret, public)
    assert keys is not None
    assert keys.secret_key in secret.read_text()
    assert keys.server_key in public.read_text()
    assert keys.secret_key not in f"{keys} {keys!r}"


def test_no_files_mean_no_keys() -> None:
    assert read_keys(None, None) is None


def test_rejects_incomplete_and_swapped_keys(pair: tuple[Path, Path]) -> None:
    secret, public = pair
    swapped = public.with_name("swapped.key")
    swapped.write_bytes(public.read_bytes())
    swapped.chmod(0o600)
    for given, text in (
        ((None, public), r"key \(the client's secret key\) is missing"),
        ((secret, None), r"server_key \(the listener's public key\) is missing"),
        ((swapped, public), "expected a secret key, got a public one"),
        ((secret, secret), "expected a public key, got a secret one"),
        ((secret.with_name("none"), public), "none: "),
    ):
        with pytest.raises(InvalidArgument, match=text):
            Client(ADDRESS, key=given[0], server_key=given[1])


def test_rejects_secret_key_readable_by_others(pair: tuple[Path, Path]) -> None:
    secret, public = pair
    secret.chmod(0o640)
    with pytest.raises(InvalidArgument, match="0600"):
        Client(ADDRESS, key=secret, server_key=public)
