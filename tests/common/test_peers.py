from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from testkit import loads
from testkit.users import ALICE, BOB, User, need_other_users
from testkit.waiting import until
from weightd_common.peers import THIS_HOST, UNKNOWN, Peer, Peers

LIMIT_S = 30.0


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.close()


@pytest.fixture(scope="module")
def alice() -> Iterator[User]:
    need_other_users()
    with User(ALICE) as user:
        yield user


def listener(stack: ExitStack, host: str) -> socket.socket:
    made = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
    made.bind((host, 0))
    made.listen()
    made.settimeout(LIMIT_S)
    return made


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_identifies_local_users_over_tcp(peers: Peers, host: str) -> None:
    need_other_users()
    with ExitStack() as stack:
        listening = listener(stack, host)
        for uid in (ALICE, BOB):
            user = stack.enter_context(User(uid))
            user.begin(loads.hold_connections, [listening.getsockname()[:2]], 1)
            user.wait_for_report()
            connection, _ = listening.accept()
            with connection:
                assert peers.identify(connection) == Peer(f"uid {uid}", is_local=True)
                user.end()


def test_daemon_user_is_an_operator(peers: Peers) -> None:
    with ExitStack() as stack:
        listening = listener(stack, "127.0.0.1")
        stack.enter_context(socket.create_connection(listening.getsockname()))
        connection = stack.enter_context(listening.accept()[0])
        assert peers.identify(connection) == Peer(f"uid {os.getuid()}", is_local=True, is_operator=True)
        # If the kernel cannot be queried, all users of this host are one peer.
        peers.close()
        assert peers.identify(connection) == THIS_HOST


def own_address(family: int) -> str:
    """Return an address of this host other than loopback; skip the test if the host has none."""
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            # These networks are reserved for documentation; nothing is sent.
            asking.connect(("2001:db8::1" if family == socket.AF_INET6 else "198.51.100.1", 9))
        except OSError:
            pytest.skip("this host has no address but loopback")
        address: str = asking.getsockname()[0]
    return address


@contextmanager
def accepted_from(user: User, host: str, connect_to: str = "", **how: Any) -> Generator[socket.socket, None, None]:
    """Have a user connect to a listener; return the listener's end of the connection when the user has finished."""
    with ExitStack() as stack:
        listening = listener(stack, host)
        user.begin(loads.connect_from, (connect_to or host, listening.getsockname()[1]), *how_of(**how))
        user.wait_for_report()
        stack.callback(user.end)
        yield stack.enter_context(listening.accept()[0])


def how_of(
    source: str = "", device: str = "", ends: str = "", linger_s: int = 0
) -> tuple[tuple[str, int] | None, str, str, int]:
    return (source, 0) if source else None, device, ends, linger_s


@pytest.mark.parametrize("ends", ["", "half"])
@pytest.mark.parametrize(
    ("host", "source"),
    [("127.0.0.1", "127.9.8.7"), ("127.0.0.1", "own"), ("own", "127.9.8.7"), ("::1", "own"), ("own6", "own")],
)
def test_user_is_the_same_peer_from_every_address(peers: Peers, alice: User, host: str, source: str, ends: str) -> None:
    family = socket.AF_INET6 if host in ("::1", "own6") else socket.AF_INET
    near = own_address(family) if host.startswith("own") else host
    far = own_address(family) if source == "own" else source
    with accepted_from(alice, near, source=far, ends=ends) as connection:
        assert connection.getpeername()[0] == far
        assert peers.identify(connection) == Peer(f"uid {ALICE}", is_local=True)


@pytest.mark.parametrize(
    ("host", "source", "device"), [("127.0.0.1", "127.9.8.7", "lo"), ("own", "", "own"), ("own6", "", "own")]
)
def test_identifies_user_of_socket_bound_to_interface(
    peers: Peers, alice: User, host: str, source: str, device: str
) -> None:
    if host.startswith("own"):
        host = own_address(socket.AF_INET6 if host == "own6" else socket.AF_INET)
        device = interface_of(host)
    with accepted_from(alice, host, source=source, device=device) as connection:
        assert peers.identify(connection) == Peer(f"uid {ALICE}", is_local=True)


def interface_of(address: str) -> str:
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip")
    lines = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout.splitlines()
    return next(line.split()[1] for line in lines if f" {address}/" in line)


def test_identifies_ipv4_client_over_ipv6_socket(peers: Peers, alice: User) -> None:
    with accepted_from(alice, "::", "::ffff:127.0.0.1", source="::ffff:127.9.8.7") as connection:
        assert peers.identify(connection) == Peer(f"uid {ALICE}", is_local=True)


@pytest.mark.parametrize("source", ["127.9.8.7", "own"])
def test_client_with_closed_socket_is_unknown(peers: Peers, alice: User, source: str) -> None:
    """The kernel shows root as the owner of a closed socket."""
    source = own_address(socket.AF_INET) if source == "own" else source
    with accepted_from(alice, "127.0.0.1", source=source, ends="close") as connection:
        assert peers.identify(connection) == UNKNOWN


def test_client_without_socket_is_unknown(peers: Peers, alice: User) -> None:
    """The client does not count as another host, and shares its limits with no client of this host."""
    source = own_address(socket.AF_INET)
    with accepted_from(alice, "127.0.0.1", source=source, ends="close", linger_s=1) as connection:
        until(lambda: not knows_socket(connection), "the end of the client's socket")
        assert peers.identify(connection) == UNKNOWN


def knows_socket(connection: socket.socket) -> bool:
    """Return whether the kernel still lists the far end of a connection."""
    host, port = connection.getpeername()
    far = f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()
    return any(line.split()[1] == far for line in lines)


def test_listener_on_client_port_is_not_the_client(peers: Peers) -> None:
    """The kernel returns the listener if there is no connection; here the client's address equals the listener's."""
    with ExitStack() as stack:
        listening = listener(stack, "127.0.0.1")
        address = listening.getsockname()

        class Redirected:
            family = socket.AF_INET

            def getpeername(self) -> tuple[str, int]:
                return address  # type: ignore[no-any-return]

            def getsockname(self) -> tuple[str, int]:
                return "127.0.0.1", 9

            def getsockopt(self, *_: int) -> bytes:
                return b"\x01"

        assert peers.identify(Redirected()) == THIS_HOST  # type: ignore[arg-type]


_HIDDEN = """
import ctypes, os, socket, sys
assert ctypes.CDLL(None, use_errno=True).unshare(0x10000000) == 0, os.strerror(ctypes.get_errno())
from weightd_common.peers import Peers
for descriptor in map(int, sys.argv[1:]):
    peer = Peers().identify(socket.socket(fileno=descriptor))
    print(peer.key, peer.is_local, peer.is_operator)
"""


def test_users_hidden_by_namespace_are_one_peer(alice: User) -> None:
    """The namespace hides the user of the querying process, too; the kernel shows the same number for both."""
    with ExitStack() as stack:
        over_tcp = stack.enter_context(accepted_from(alice, "127.0.0.1"))
        unix, far = socket.socketpair()
        stack.enter_context(unix)
        stack.enter_context(far)
        descriptors = [over_tcp.fileno(), unix.fileno()]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", _HIDDEN, *map(str, descriptors)]
        asked = subprocess.run(command, env=env, pass_fds=descriptors, capture_output=True, text=True, check=False)
    if "Operation not permitted" in asked.stderr:
        pytest.skip("this host allows no user namespaces")
    assert asked.stdout.splitlines() == 2 * ["uid 65534 True False"], asked.stderr


@pytest.fixture
def namespace() -> Iterator[int]:
    """Start a process in a network namespace with 198.18.0.2, connected to 198.18.0.1 of this one; return its pid."""
    need_other_users()
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs the commands ip and unshare")
    name = f"wtd{os.getpid()}"
    command = ["unshare", "--net", "sh", "-c", "echo && exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            pytest.skip("this host allows no network namespaces")
        within = ["nsenter", "--target", str(process.pid), "--net"]
        try:
            for each in (
                ["ip", "link", "add", name, "type", "veth", "peer", "name", "far0", "netns", str(process.pid)],
                ["ip", "addr", "add", "198.18.0.1/30", "dev", name],
                ["ip", "link", "set", name, "up"],
                [*within, "ip", "addr", "add", "198.18.0.2/30", "dev", "far0"],
                [*within, "ip", "link", "set", "far0", "up"],
            ):
                made = subprocess.run(each, capture_output=True, text=True, check=False)
                if "not supported" in made.stderr or "Unknown device type" in made.stderr:
                    pytest.skip("this host has no veth")
                assert made.returncode == 0, made.stderr
            yield process.pid
        finally:
            subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)
            process.communicate()


_CONNECT = "import socket,sys; s = socket.create_connection(('198.18.0.1', int(sys.argv[1])), 5); sys.stdin.read()"


def test_other_network_namespace_is_another_host(peers: Peers, namespace: int) -> None:
    with ExitStack() as stack:
        listening = listener(stack, "198.18.0.1")
        command = ["nsenter", "--target", str(namespace), "--net", sys.executable, "-c", _CONNECT]
        client = stack.enter_context(
            subprocess.Popen([*command, str(listening.getsockname()[1])], stdin=subprocess.PIPE)
        )
        with listening.accept()[0] as connection:
            assert peers.identify(connection) == Peer("host 198.18.0.2")
            client.communicate()


def test_disconnected_peer_is_unknown(peers: Peers) -> None:
    with ExitStack() as stack:
        listening = listener(stack, "127.0.0.1")
        socket.create_connection(listening.getsockname()).close()
        connection = stack.enter_context(listening.accept()[0])
        assert connection.recv(1) == b""
        assert peers.identify(connection) == UNKNOWN
        closed = socket.socket()
        closed.close()
        assert peers.identify(closed) == UNKNOWN


def test_identifies_user_of_unix_socket(peers: Peers) -> None:
    near, far = socket.socketpair()
    with near, far:
        uid = os.getuid()
        assert peers.identify(near) == Peer(f"uid {uid}", uid, is_local=True, is_operator=True)


class Remote:
    """A connection from another host."""

    family = socket.AF_INET6

    def __init__(self, address: str) -> None:
        self._address = address

    def getpeername(self) -> tuple[str, int, int, int]:
        return self._address, 1234, 0, 0

    def getsockname(self) -> tuple[str, int, int, int]:
        return "2001:db8::1", 8000, 0, 0


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("2001:db8:1:2:3:4:5:6", "host 2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "host 2001:db8:1:2::/64"),
        ("2001:db8:1:3::9", "host 2001:db8:1:3::/64"),
        ("::ffff:10.0.0.7", "host 10.0.0.7"),
        ("fe80::1%eth0", "host fe80::/64"),
    ],
)
def test_remote_peer_is_address_or_network(peers: Peers, address: str, key: str) -> None:
    assert peers.identify(Remote(address)) == Peer(key)  # type: ignore[arg-type]
