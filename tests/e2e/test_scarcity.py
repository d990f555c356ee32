"""Resource shortage: a full or read-only disk, no file descriptors, no /dev/shm. The daemon reports each."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from testkit import census, fuse, loads
from testkit.waiting import until
from weightd import Client
from weightd_common.endpoints import unix_path
from weightd_protocol.messages.status import ModelStatus

from .support import MLP_WEIGHT_BYTES, MLP_WIDTH, ONE_ENGINE, DaemonPaths, SampleRequest, Weightd, ask_all, assert_same

pytestmark = [
    pytest.mark.e2e,
    ONE_ENGINE,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can mount, and change limits of other processes"),
]

MODEL_MIB = MLP_WEIGHT_BYTES // 2**20 + 1


@contextlib.contextmanager
def disk(place: DaemonPaths, mib: int, *options: str) -> Generator[None, None, None]:
    """Mount a disk of this size at the daemon's cache directory."""
    more = ",".join([f"size={mib}m", *options])
    subprocess.run(["mount", "-t", "tmpfs", "-o", more, "tmpfs", str(place.cache)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place.cache)], check=True)


def model(client: Client) -> ModelStatus:
    return client.status().models[0]


def test_full_disk_fails_snapshot(mlp: Path, place: DaemonPaths) -> None:
    with disk(place, MODEL_MIB - 2), place.serve({"mlp": {"path": mlp}}) as daemon:
        with daemon.client(place.address) as client:
            until(lambda: model(client).state == "failed", "the model fails")
            [generation] = model(client).generations
            assert "No space left on device" in generation.reason
            assert "cannot copy" in generation.reason
            # The disk has space now, so the next attempt succeeds.
            subprocess.run(["mount", "-o", f"remount,size={4 * MODEL_MIB}m", str(place.cache)], check=True)
            until(lambda: model(client).state == "serving", "the daemon loads the model again")
        assert daemon.end() == 0


def test_full_disk_prevents_sharing_of_weights(mlp: Path, questions: list[SampleRequest], place: DaemonPaths) -> None:
    with disk(place, MODEL_MIB + 1), place.serve({"mlp": {"path": mlp, "workers": 2, "threads": 2}}) as daemon:
        with daemon.client(place.address) as client:
            ask_all(client, "mlp", questions)
            until(lambda: "mlp.1: serving" in daemon.log, "every worker is READY")
            [generation] = model(client).generations
            assert "weights are not shared" in generation.note
            assert "No space left on device" in generation.note
            # A holder would keep a copy that no worker shares.
            assert {each.role for each in generation.processes} == {"worker"}
            assert generation.saved_bytes == 0
        assert daemon.end() == 0


def test_disk_full_while_serving_loses_no_answer(mlp: Path, questions: list[SampleRequest], place: DaemonPaths) -> None:
    with (
        disk(place, 3 * MODEL_MIB),
        place.serve({"mlp": {"path": mlp, "workers": 2}}) as daemon,
        daemon.client(place.address) as client,
    ):
        ask_all(client, "mlp", questions)
        until(lambda: "mlp.1: serving" in daemon.log, "every worker is READY")
        with contextlib.suppress(OSError), (place.cache / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        victim = next(each for each in model(client).generations[0].processes if each.role == "worker")
        os.kill(victim.pid, 9)
        until(lambda: "w3" in str(model(client)), "a replacement is started")
        ask_all(client, "mlp", questions * 5)
        assert model(client).failed == 0


def test_read_only_disk_ends_start_with_error(mlp: Path, place: DaemonPaths) -> None:
    with disk(place, 1, "ro"), place.serve({"mlp": {"path": mlp}}) as daemon:
        assert daemon.wait() == 73
        assert f"cannot make the directory {place.cache}" in daemon.log
        assert "Read-only file system" in daemon.log


def test_serves_others_when_clients_exhaust_descriptors(
    mlp: Path, questions: list[SampleRequest], place: DaemonPaths
) -> None:
    with place.serve({"mlp": {"path": mlp}}) as daemon, daemon.client(place.address) as client:
        ask_all(client, "mlp", questions)
        soft, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (1400, 1400))
        assert soft == hard, "the daemon raises its soft limit to the hard limit"
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                for _ in range(900):
                    greedy = stack.enter_context(socket.socket(socket.AF_UNIX))
                    greedy.connect(unix_path(place.zmq_address))
            daemon.wait_for("disconnecting some")
            ask_all(client, "mlp", questions * 5)
        # The clients have disconnected; the daemon accepts connections again.
        until(lambda: "accepting connections again" in daemon.log, "the daemon accepts connections")
        with daemon.client(place.address) as another:
            ask_all(another, "mlp", questions)
        assert daemon.end() == 0


def test_new_clients_wait_while_too_many_descriptors_in_flight(
    mlp: Path, questions: list[SampleRequest], place: DaemonPaths
) -> None:
    with (
        place.serve({"mlp": {"path": mlp}}) as daemon,
        daemon.client(place.zmq_address) as client,
        daemon.client(place.zmq_address) as late,
    ):
        ask_all(client, "mlp", questions)
        [proxy] = [pid for pid in census.families([daemon.pid]) if census.role(pid) == "proxy"]
        resource.prlimit(proxy, resource.RLIMIT_NOFILE, (1400, 1400))
        # The kernel counts the descriptors in flight of all processes of a user, here root.
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for _ in range(8):
                socket.send_fds(ours, [b"\0"], [0] * 250)
            pending = late.submit("mlp", questions[0].inputs)
            ask_all(client, "mlp", questions)
            assert not pending.done()
        assert_same(pending.result(), questions[0].answer)
        assert proxy in census.families([daemon.pid])


def closed(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


@pytest.mark.skipif(not fuse.is_available(), reason="FUSE is not available")
def test_starts_processes_despite_blocking_close(
    mlp: Path, questions: list[SampleRequest], place: DaemonPaths, tmp_path: Path
) -> None:
    table = {"path": mlp, "workers": 1, "start": "spawn"}
    with (
        place.serve({"mlp": table}) as daemon,
        fuse.unclosable(tmp_path / "file"),
        daemon.client(place.address) as client,
    ):
        ask_all(client, "mlp", questions)
        descriptor = os.open(tmp_path / "file", os.O_RDONLY)
        try:
            # The daemon's close of the first descriptor blocks as long as the file system exists; the others stay open.
            for _ in range(8):
                loads.pass_descriptor(f"{place.address}.unix", descriptor)
            os.kill(model(client).generations[0].processes[-1].pid, signal.SIGKILL)
            ask_all(client, "mlp", questions)
            # The reload starts a process that reads the configuration and a process that copies the model.
            place.config({"mlp": {**table, "threads": 2}})
            assert client.reload().changed == ("mlp",)
            until(lambda: "mlp.2: serving" in daemon.log, "the changed model serves")
            # The zygote, and the ZeroMQ proxies forked from it.
            family = census.families([daemon.pid])
            [zygote] = [pid for pid in family if census.role(pid) == "zygote"]
            proxies = [pid for pid in family if census.role(pid) == "proxy"]
            assert proxies
            os.kill(zygote, signal.SIGKILL)
            # A proxy that is about to exit may still accept a connection.
            until(lambda: not {*proxies} & {*census.families([daemon.pid])}, "the proxies exit")
            with daemon.client(place.zmq_address) as another:
                ask_all(another, "mlp", questions)
        finally:
            threading.Thread(target=closed, args=(descriptor,)).start()


def test_serves_without_dev_shm(mlp: Path, questions: list[SampleRequest], place: DaemonPaths, tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    assert unshare
    config = place.config({"mlp": {"path": mlp, "workers": 2}})
    script = tmp_path / "without"
    script.write_text(f'umount -l /dev/shm || exit 1\nexec "{sys.executable}" -m weightd_daemon serve "{config}"\n')
    with (tmp_path / "log").open("wb") as log:
        daemon = subprocess.Popen([unshare, "-m", "sh", str(script)], stdout=log, stderr=log)
    try:
        until(lambda: Path(place.address).exists(), "the daemon listens")
        with Client(place.address, timeout=60.0) as client:
            ask_all(client, "mlp", questions)
            until(lambda: model(client).generations[0].progress == "serving", "every worker is READY")
            assert model(client).generations[0].saved_bytes
    finally:
        daemon.terminate()
        assert daemon.wait(60) == 0


UID = 61235

# Root has no process limit, so the daemon runs as another user, with permission to read the installed files.
AS_A_USER = [
    "setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups",
    "--inh-caps=-all,+dac_override", "--ambient-caps=-all,+dac_override",
]  # fmt: skip


def limit_processes(most: int, pids: list[int]) -> None:
    """Change the soft limit; it fails for the ZeroMQ proxies and for processes that have exited."""
    for pid in pids:
        subprocess.run(
            [*AS_A_USER, "prlimit", f"--nproc={most}:", f"--pid={pid}"], check=False, stderr=subprocess.DEVNULL
        )


def test_process_limit_ends_start_with_error(mlp: Path, place: DaemonPaths, tmp_path: Path) -> None:
    config = place.config({"mlp": {"path": mlp}})
    with Weightd(tmp_path / "log", "serve", config, under=[*AS_A_USER, "prlimit", "--nproc=1"]) as daemon:
        assert daemon.wait() == 73
        assert (
            "cannot start a process or thread: the limit of processes and threads is reached (RLIMIT_NPROC 1"
            in daemon.log
        )


def test_replaces_worker_when_process_limit_is_raised(
    mlp: Path, questions: list[SampleRequest], place: DaemonPaths, tmp_path: Path
) -> None:
    # In /tmp, because the checkout may lie in a directory that no other user may enter.
    place = DaemonPaths(place.runtime, place.runtime / "cache")
    place.cache.mkdir(mode=0o700)
    config = place.config({"mlp": {"path": mlp, "workers": 2}})
    for path in (place.runtime, place.cache, config):
        os.chown(path, UID, UID)
    with Weightd(tmp_path / "log", "serve", config, under=AS_A_USER) as daemon, daemon.client(place.address) as client:
        daemon.wait_for("mlp.1: serving")
        processes = census.families([daemon.pid])
        limit_processes(1, processes)
        victim = next(each for each in model(client).generations[0].processes if each.role == "worker")
        os.kill(victim.pid, 9)
        until(lambda: "(RLIMIT_NPROC 1" in daemon.log, "the log names the limit")
        assert "cannot start a process or thread: the limit of processes and threads is reached" in daemon.log
        assert "raise LimitNPROC= or ulimit -u" in daemon.log
        ask_all(client, "mlp", questions)
        # The daemon serves metrics and large shared tensors in threads.
        assert client.metrics().models
        with daemon.client(place.address) as another:
            another.infer("mlp", {"x": another.empty((256, MLP_WIDTH), np.float32)})
        ask_all(client, "mlp", questions)
        limit_processes(resource.getrlimit(resource.RLIMIT_NPROC)[1], processes)
        until(lambda: model(client).generations[0].progress == "serving", "every worker is READY again")
        ask_all(client, "mlp", questions)
        assert daemon.end() in (0, 2)
