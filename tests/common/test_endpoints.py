from __future__ import annotations

from weightd_common import endpoints


def test_the_unix_socket_lies_beside_the_first_and_that_of_a_daemon_on_tcp_with_its_children_s() -> None:
    assert endpoints.unix_path("ipc:///run/weightd/weightd.sock", "/elsewhere") == "/run/weightd/weightd.sock.unix"
    one, other = (endpoints.unix_path(f"tcp://127.0.0.1:{port}", "/run/weightd") for port in (5555, 5556))
    assert one == f"/run/weightd/{endpoints.daemon_key('tcp://127.0.0.1:5555')}.unix"
    assert one != other


def test_what_a_client_writes_without_zeromq_leads_to_the_daemons_socket() -> None:
    there = ("/run/d.sock", "/run/d.sock.unix", "unix:///run/d.sock", "unix:///run/d.sock.unix", "ipc:///run/d.sock")
    for address in there:
        assert endpoints.daemon_socket(address) == "ipc:///run/d.sock"
    for address in ("", "tcp://127.0.0.1:5555", "unix://run/d.sock", "d.sock"):
        assert endpoints.daemon_socket(address) == address
