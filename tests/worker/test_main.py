"""Tests of a child as the daemon starts it: real process, real socket, and the real engine of this interpreter."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Tuple

import numpy as np
import pytest
import zmq

from weightd_protocol.messages.worker import Attach, Attached, Build, Built, Hello, ProcessFailed, TrimStore
from weightd_protocol.version import VERSION
from weightd_worker import exit_codes

if TYPE_CHECKING:
    from tests.worker.conftest import Daemon

Model = Callable[[str], Path]

MIB = 1 << 20
ENGINE = "mindspore_lite" if importlib.util.find_spec("mindspore_lite") else "onnxruntime"
OTHER = "onnxruntime" if ENGINE == "mindspore_lite" else "mindspore_lite"


def serve(daemon: Daemon, model: Path) -> Tuple[Built, Attached]:
    """Start a holder "h" and attach a worker "w" to its weights."""
    for name in ("h", "w"):
        daemon.start(name, model)
        daemon.receive(name, Hello)
    daemon.send("h", Build(()))
    built, _ = daemon.receive("h", Built)
    daemon.send("w", Attach(built.handle, built.selftest_cases))
    attached, _ = daemon.receive("w", Attached)
    assert attached.selftest_digest == built.selftest_digest
    return built, attached


def test_life_cycle(daemon: Daemon, model: Model) -> None:
    path = model("wide")
    own = int(Path("/proc/self/oom_score_adj").read_text("ascii"))
    # A shell may have started the tests with SIGINT ignored, which children inherit.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for name, role, above in (("h", "holder", 200), ("w", "worker", 400)):
            daemon.start(name, path, "--role", role, "--origin-note", "spawned by the test")
            hello, _ = daemon.receive(name, Hello)
            assert (hello.origin, hello.origin_note) == ("spawned", "spawned by the test")
            assert hello.engine_pid == str(daemon.children[name].pid)
            assert hello.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
            assert hello.versions["weightd"] == VERSION
            assert sorted(hello.versions) == sorted(["weightd", "python", "numpy", ENGINE])
            assert not hello.sharing_traits.pids_fixed_at_build
            # The kernel kills the child before the daemon when memory runs out; only the daemon handles Ctrl-C.
            score = Path(f"/proc/{hello.engine_pid}/oom_score_adj").read_text("ascii")
            assert int(score) == min(own + above, 1000)
            daemon.children[name].send_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    daemon.send("h", Build(()))
    built, _ = daemon.receive("h", Built)
    assert built.handle == str(daemon.directory / "store")
    assert (built.inputs[0].shape, built.outputs[0].shape) == ((-1, 1024), (-1, 1024))
    assert built.selftest_cases == ({"x": (1, 1024)}, {"x": (2, 1024)})
    daemon.send("w", Attach(built.handle, built.selftest_cases))
    attached, _ = daemon.receive("w", Attached)
    assert (attached.selftest_digest, attached.note) == (built.selftest_digest, "")
    assert built.shared_bytes >= attached.shared_bytes >= 4 * MIB - 64 * 1024
    # A store that cannot be trimmed causes only a warning.
    (daemon.directory / "store").unlink()
    daemon.send("h", TrimStore())

    i, j = np.ogrid[:1024, :1024]
    weights = ((i + 3 * j) % 5 - 2).astype(np.float32)
    for size in (1, 64, 3, 3):  # 64: 256 KiB, which is not copied into the message
        x = (np.arange(size * 1024) % 7 - 3).astype(np.float32).reshape(size, 1024)
        daemon.ask("w", size, x=x)
        assert np.array_equal(daemon.answer("w", size), x @ weights)
    assert [daemon.stop("w"), daemon.stop("h")] == [exit_codes.OK, exit_codes.OK]
    assert "WARNING weightd.worker: the page store's cold pages stay in memory: " in daemon.log("h")
    assert "KeyboardInterrupt" not in daemon.log("h") + daemon.log("w")


def test_threads_stay_on_assigned_cores(daemon: Daemon, model: Model) -> None:
    core = str(max(os.sched_getaffinity(0)))
    # The daemon sets these variables: numpy, imported earlier, would start threads without them.
    alone = {"OPENBLAS_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "1"}
    daemon.start("w", model("wide"), "--threads", "2", "--cores", core, device="cpu:0", variables=alone)
    hello, _ = daemon.receive("w", Hello)
    daemon.send("w", Build(()))
    daemon.receive("w", Built)
    status = [(task / "status").read_text("ascii") for task in Path(f"/proc/{hello.engine_pid}/task").iterdir()]
    assert len(status) > 1
    assert {re.findall(r"Cpus_allowed_list:\s*(.+)", each)[0] for each in status} == {core}


def test_exits_if_cores_are_unavailable(daemon: Daemon, model: Model) -> None:
    daemon.start("w", model("wide"), "--cores", "9999", device="cpu:0")
    assert daemon.children["w"].wait(30) == 1
    assert daemon.log("w").splitlines()[-1] == "cannot run on cores 9999: Invalid argument"


def test_shares_memory_of_first_predict(daemon: Daemon, model: Model) -> None:
    """MindSpore Lite rearranges the weights of a convolution in its first predict: a quarter of the shared memory
    here."""
    built, attached = serve(daemon, model("convolution"))
    assert built.shared_bytes > 2 * MIB
    assert attached.shared_bytes > 0.9 * built.shared_bytes


def test_serves_without_shareable_memory(daemon: Daemon, model: Model) -> None:
    built, attached = serve(daemon, model("relu"))
    note = "weights are not shared: the model has no memory of 128 KiB or more in one piece"
    assert (built.handle, built.note, built.has_sharing_failed) == ("", note, False)
    assert (attached.shared_bytes, attached.note) == (0, "")
    assert not (daemon.directory / "store").exists()
    daemon.ask("w", 1, x=np.array([[-1, 2, -3, 4]], np.float32))
    assert daemon.answer("w", 1).tolist() == [[0, 2, 0, 4]]


def test_unusable_store_costs_only_memory(daemon: Daemon, model: Model) -> None:
    (daemon.directory / "store").write_bytes(b"another file")
    built, _ = serve(daemon, model("wide"))
    assert (built.handle, built.shared_bytes, built.has_sharing_failed) == ("", 0, True)
    assert built.note.startswith("weights are not shared: sharing pages failed: ")
    daemon.start("late", model("wide"))
    daemon.receive("late", Hello)
    daemon.send("late", Attach(str(daemon.directory / "store"), built.selftest_cases))
    attached, _ = daemon.receive("late", Attached)
    assert (attached.selftest_digest, attached.shared_bytes) == (built.selftest_digest, 0)
    assert attached.note.startswith("weights are not shared: ")


def test_error_names_unreadable_model(daemon: Daemon, tmp_path: Path) -> None:
    daemon.start("h", tmp_path / "none.onnx")
    broken, _ = daemon.receive("h", ProcessFailed)
    assert broken.reason.startswith(f"{tmp_path}/none.onnx: ")
    assert daemon.stop("h") == exit_codes.CANNOT_BUILD


@pytest.mark.skipif(importlib.util.find_spec(OTHER) is not None, reason="this interpreter has both engines")
def test_missing_engine_has_a_hint(daemon: Daemon, tmp_path: Path) -> None:
    daemon.start("h", tmp_path, engine=OTHER)
    broken, _ = daemon.receive("h", ProcessFailed)
    assert broken.reason.startswith(f"{sys.executable}: No module named '{OTHER}'; install ")
    assert daemon.stop("h") == exit_codes.NO_ENGINE
    assert "Traceback" not in daemon.log("h")


def test_reports_any_import_failure(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{ENGINE}.py").write_text("raise ValueError('numpy.ndarray size changed')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    daemon.start("h", tmp_path)
    broken, _ = daemon.receive("h", ProcessFailed)
    assert broken.reason == f"{sys.executable}: numpy.ndarray size changed"
    assert daemon.stop("h") == exit_codes.NO_ENGINE
    assert "Traceback" in daemon.log("h")


def test_protocol_violation_ends_child(daemon: Daemon, model: Model) -> None:
    daemon.start("h", model("relu"))
    daemon.receive("h", Hello)
    daemon.socket.send_multipart([b"h", b"\xc1"])
    assert daemon.children["h"].wait(30) == exit_codes.FAILED
    assert "RemoteProtocolError" in daemon.log("h")


def test_sigterm_ends_waiting_child(daemon: Daemon, model: Model) -> None:
    daemon.start("h", model("relu"))
    daemon.receive("h", Hello)
    daemon.children["h"].terminate()
    assert daemon.children["h"].wait(30) == -signal.SIGTERM


def test_child_of_another_parent_ends_silently(daemon: Daemon, tmp_path: Path) -> None:
    daemon.start("h", tmp_path, parent=1)
    assert daemon.children["h"].wait(30) == 1
    assert f"expected to be a child of 1, but the parent is {os.getpid()}" in daemon.log("h")
    with pytest.raises(zmq.Again):
        daemon.socket.recv(zmq.NOBLOCK)
