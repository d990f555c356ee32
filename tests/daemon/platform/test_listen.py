"""Listening sockets: inherited from the service manager, or created with permissions and removed at the end."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weightd_daemon.platform.directories import PathInUse
from weightd_daemon.platform.listen import listen_addresses, listen_on

LIMIT_S = 20.0


@pytest.fixture
def port() -> int:
    with socket.socket(socket.AF_INET) as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
    return found


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def refused(address: str) -> str:
    with pytest.raises(PathInUse) as caught, listen_on(address):
        pass
    return str(caught.value)


def connects(to: socket.socket, family: int, name: Any) -> bool:
    """Connect by this name and accept the connection at the socket."""
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(LIMIT_S)
        client.connect(name)
        accepted, _ = to.accept()
        accepted.close()
    return True


# --- inherited ------------------------------------------------------------------------------------------------------


@pytest.fixture
def passed() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for each in made:
        each.close()


def test_derives_address_from_the_socket_name(tmp_path: Path, passed: list[socket.socket]) -> None:
    passed += [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for each, name in zip(passed, ("s", "s.unix"), strict=True):
        each.bind(f"{tmp_path}/{name}")
    assert listen_addresses([each.fileno() for each in passed]) == [f"ipc://{tmp_path}/s", f"unix://{tmp_path}/s.unix"]


@pytest.mark.parametrize(
    ("family", "name", "kind"),
    [
        (socket.AF_UNIX, "{}/d", socket.SOCK_DGRAM),
        (socket.AF_UNIX, "{}/p", socket.SOCK_SEQPACKET),
        (socket.AF_UNIX, "\0weightd-test-{}", socket.SOCK_STREAM),
        (socket.AF_UNIX, "", socket.SOCK_STREAM),  # the kernel assigns an abstract name
        (socket.AF_INET, ("127.0.0.1", 0), socket.SOCK_DGRAM),
    ],
)
def test_rejects_sockets_without_a_usable_address(
    tmp_path: Path, passed: list[socket.socket], family: int, name: Any, kind: int
) -> None:
    bad = socket.socket(family, kind)
    passed.append(bad)
    bad.bind(name.format(tmp_path) if isinstance(name, str) else name)
    message = f"^descriptor {bad.fileno()} from the service manager: expected a stream socket with a path or a port$"
    with pytest.raises(PathInUse, match=message):
        listen_addresses([bad.fileno()])
    os.fstat(bad.fileno())


def test_rejects_descriptors_that_are_not_sockets() -> None:
    read, write = os.pipe()
    message = f"^descriptor {read} from the service manager is not a socket: "
    with pytest.raises(PathInUse, match=f"{message}Socket operation on non-socket$"):
        listen_addresses([read])
    for each in (read, write):
        os.close(each)
    with pytest.raises(PathInUse, match=f"{message}Bad file descriptor$"):
        listen_addresses([read])


# --- created --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["unix", "ipc"])
def test_creates_unix_socket_with_permissions_and_removes_it(tmp_path: Path, scheme: str) -> None:
    path = tmp_path / "run/s"
    before = os.umask(0)
    try:
        with listen_on(f"{scheme}://{path}") as made:
            assert stat.S_IMODE(path.lstat().st_mode) == 0o660
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
            assert not made.getblocking()
            assert connects(made, socket.AF_UNIX, str(path))
            # A killed process leaves such a socket behind; this one still listens.
            assert refused(f"{scheme}://{path}") == f"{path}: another program listens on this path"
            path.rename(path.with_suffix(".left"))
    finally:
        os.umask(before)
    path.with_suffix(".left").rename(path)
    with listen_on(f"{scheme}://{path}") as made:
        assert connects(made, socket.AF_UNIX, str(path))
    assert list(path.parent.iterdir()) == []


def test_leaves_other_files_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    assert refused(f"unix://{tmp_path}/s").startswith(f"{tmp_path}/s: expected a socket or no file; ")
    assert (tmp_path / "s").read_text() == "precious"


def test_reports_path_too_long_for_a_socket(tmp_path: Path) -> None:
    assert refused(f"unix://{tmp_path}/{'s' * 108}").endswith(": AF_UNIX path too long")


@pytest.mark.parametrize(
    ("host", "family", "name"),
    [
        ("127.0.0.1", socket.AF_INET, "127.0.0.1"),
        ("localhost", socket.AF_INET, "127.0.0.1"),
        ("*", socket.AF_INET, "127.0.0.1"),
        *(
            pytest.param(host, family, name, marks=pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6"))
            for host, family, name in (
                ("[::1]", socket.AF_INET6, "::1"),
                ("[::]", socket.AF_INET6, "::1"),
                ("[::]", socket.AF_INET, "127.0.0.1"),
            )
        ),
    ],
)
def test_listens_on_tcp(port: int, host: str, family: int, name: str) -> None:
    # The first round leaves a connection in TIME_WAIT, which does not block the port for the second one.
    for _ in range(2):
        with listen_on(f"tcp://{host}:{port}") as made:
            assert connects(made, family, (name, port))
            assert refused(f"tcp://{host}:{port}") == f"cannot listen on tcp://{host}:{port}: Address already in use"


def test_rejects_addresses_of_other_hosts(port: int) -> None:
    assert refused(f"tcp://192.0.2.1:{port}").endswith("Cannot assign requested address")
    assert refused(f"tcp://[fe80::x]:{port}").startswith(f"cannot listen on tcp://[fe80::x]:{port}: ")
