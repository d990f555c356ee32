from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from weightd_daemon.config.load import Config, parse
from weightd_daemon.handover.systemd_sockets import listen
from weightd_daemon.platform.directories import PathInUse
from weightd_daemon.platform.listen import listen_addresses, listen_on

MODELS = {"m": {"path": "/m.onnx"}}


def config(directory: Path, passed: list[int], *names: str) -> Config:
    """One with a listener of each name, and with the sockets of a service manager."""
    tables = {name: {"address": f"ipc://{directory}/{name}"} for name in names}
    daemon = {"runtime_dir": str(directory), "cache_dir": str(directory)}
    return parse({"daemon": daemon, "listeners": tables, "models": MODELS}, directory, listen_addresses(passed))


def passed(*where: Path) -> list[int]:
    """Descriptors of sockets that listen already."""
    descriptors: list[int] = []
    for each in where:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(each))
            made.listen()
            descriptors.append(os.dup(made.fileno()))
    return descriptors


def names(directory: Path) -> set[str]:
    return {each.name for each in directory.iterdir()}


def test_without_a_service_manager_all_is_opened_and_nothing_is_left(tmp_path: Path) -> None:
    with listen(config(tmp_path, []), []) as found:
        assert names(tmp_path) == {"weightd.sock", "weightd.sock.unix"}
        assert found.addresses == [f"unix://{tmp_path}/weightd.sock.unix", f"ipc://{tmp_path}/weightd.sock"]
        assert [*found.zmq_listeners] == ["default"]
    assert names(tmp_path) == set()
    with listen(config(tmp_path, [], "a", "b"), []) as found:
        assert names(tmp_path) == {"weightd.sock.unix", "a", "b"}
        assert {name: each.getsockname() for name, each in found.zmq_listeners.items()} == {
            "a": f"{tmp_path}/a",
            "b": f"{tmp_path}/b",
        }


def test_what_was_passed_is_taken_and_what_was_not_is_opened(tmp_path: Path) -> None:
    given = passed(tmp_path / "b", tmp_path / "w.unix")
    with listen(config(tmp_path, given, "a", "b"), given) as found:
        assert [each.fileno() for each in found.unix_listeners] == [given[1]]
        assert found.zmq_listeners["b"].fileno() == given[0]
        assert not any(each.getblocking() for each in (*found.unix_listeners, *found.zmq_listeners.values()))
        assert names(tmp_path) == {"a", "b", "w.unix"}
    assert names(tmp_path) == {"b", "w.unix"}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(given[0])


def test_units_that_pass_no_unix_socket_can_do_without_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = passed(tmp_path / "weightd.sock")
    with listen(config(tmp_path, given), given) as found:
        assert [each.getsockname() for each in found.unix_listeners] == [f"{tmp_path}/weightd.sock.unix"]
    assert not caplog.records
    given = passed(tmp_path / "other.sock")
    with listen_on(f"unix://{tmp_path}/other.sock.unix"), listen(config(tmp_path, given), given) as found:
        assert (found.unix_listeners, found.addresses) == ([], [f"ipc://{tmp_path}/other.sock"])
    assert "have to speak ZeroMQ, which is slower: " in caplog.text


def test_without_units_the_unix_socket_is_needed(tmp_path: Path) -> None:
    with (
        listen_on(f"unix://{tmp_path}/weightd.sock.unix"),
        pytest.raises(PathInUse, match="another program listens there"),
        listen(config(tmp_path, []), []),
    ):
        pass
    assert names(tmp_path) == set()
