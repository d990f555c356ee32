from __future__ import annotations

from weightd_common import endpoints


def test_path_of_unix_socket() -> None:
    assert endpoints.unix_path("ipc:///run/weightd/weightd.sock", "/elsewhere") == "/run/weightd/weightd.sock.unix"
    one, other = (endpoints.unix_path(f"tcp://127.0.0.1:{port}", "/run/weightd") for port in (5555, 5556))
    assert one == f"/run/weightd/{endpoints.daemon_key('tcp://127.0.0.1:5555')}.unix"
    assert one != other


def test_maps_client_address_to_daemon_socket() -> None:
    there = ("/run/d.sock", "/run/d.sock.unix", "unix:///run/d.sock", "unix:///run/d.sock.unix", "ipc:///run/d.sock")
    for address in there:
        assert endpoints.daemon_socket(address) == "ipc:///run/d.sock"
    for address in ("", "tcp://127.0.0.1:5555", "unix://run/d.sock", "d.sock"):
        assert endpoints.daemon_socket(address) == address
