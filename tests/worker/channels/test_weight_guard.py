"""A worker on shared weights answers on a channel only while its holder lives and its page store is unchanged."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any, Generator

import numpy as np
import pytest

from testkit.channels import Client, Device, Worker, request
from weightd_common.channels.pages import CURRENT_REQUEST, STAGE, STAGE_RUNNING
from weightd_protocol.messages.channels import WatchWeights
from weightd_worker import exit_codes
from weightd_worker.channels.weight_guard import WeightGuard


@pytest.fixture
def holder() -> Generator[Any, None, None]:
    with subprocess.Popen(["/bin/sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.write_bytes(bytes(100))
    os.utime(path, ns=(1, 1))
    return path


def statm_of(process: Any) -> int:
    return os.open(f"/proc/{process.pid}/statm", os.O_RDONLY)


def end(process: Any) -> None:
    """Kill a process and wait for its exit, but leave it to its parent to read the exit status."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_weights_are_invalid_from_the_exit_of_the_holder_on(holder: Any) -> None:
    guard = WeightGuard(statm_of(holder), None, ())
    assert guard.are_weights_valid()
    end(holder)
    assert not guard.are_weights_valid()
    holder.wait()
    assert not guard.are_weights_valid()
    guard.close()


@pytest.mark.parametrize("is_truncated", [False, True])
def test_weights_are_invalid_after_a_write_to_the_store(store: Path, is_truncated: bool) -> None:
    guard = WeightGuard(None, os.open(store, os.O_RDONLY), (100, 1))
    assert guard.are_weights_valid()
    if is_truncated:
        os.truncate(store, 50)
        os.utime(store, ns=(1, 1))
    else:
        store.write_bytes(b"1" * 100)
    assert not guard.are_weights_valid()
    guard.close()


def test_worker_without_valid_weights_exits_without_an_answer(
    device: Device, worker: Worker, client: Client, holder: Any, store: Path
) -> None:
    worker.connection.descriptors += [statm_of(holder), os.open(store, os.O_RDONLY)]
    worker.channels.on_order(WatchWeights(has_holder=True, store=(100, 1)))
    client.send(request(6))
    assert worker.serve() == exit_codes.OK
    assert client.answer()[0] == "6"

    def run(inputs: Any) -> Any:
        end(holder)
        return {"y": np.zeros(4, np.float32)}

    worker.engine.answer = run
    client.send(request(7))
    client.send(request(8))
    assert worker.serve() == exit_codes.MODEL_CORRUPTED
    assert not client.has_answer()
    words = device.row().words
    assert (words[STAGE], words[CURRENT_REQUEST], device.ended()) == (STAGE_RUNNING, 7, 1)


def test_next_daemon_replaces_the_files(worker: Worker, client: Client, store: Path) -> None:
    for size in (99, 100):
        worker.connection.descriptors.append(os.open(store, os.O_RDONLY))
        worker.channels.on_order(WatchWeights(has_holder=False, store=(size, 1)))
    client.send(request(6))
    assert worker.serve() == exit_codes.OK
    assert client.answer()[0] == "6"
