"""The child as the daemon starts it: a real process, a real socket, the real engine of this interpreter."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, List, Tuple

import numpy as np
import pytest
import zmq

from weightd.protocol.messages.children import Attach, Attached, Broken, Build, Built, Failed, Hello, Settle
from weightd.protocol.version import VERSION
from weightd.worker import exits

if TYPE_CHECKING:
    from tests.worker.conftest import Daemon

Model = Callable[[str], Path]

MIB = 1 << 20
ENGINE = "mindspore_lite" if importlib.util.find_spec("mindspore_lite") else "onnxruntime"
OTHER = "onnxruntime" if ENGINE == "mindspore_lite" else "mindspore_lite"


def serve(daemon: Daemon, model: Path, *workers: str) -> Tuple[Built, List[Attached]]:
    """A holder "h" and workers, one after another."""
    for name in ("h", *workers):
        daemon.start(name, model)
        daemon.hear(name, Hello)
    daemon.tell("h", Build(tuple(str(daemon.children[name].pid) for name in workers)))
    built, _ = daemon.hear("h", Built)
    attached: List[Attached] = []
    for name in workers:
        daemon.tell(name, Attach(built.handle, built.canary_cases))
        attached.append(daemon.hear(name, Attached)[0])
    return built, attached


@pytest.mark.skipif(ENGINE == "mindspore_lite", reason="its converter makes a scalar of what has no rank")
def test_requests_choose_the_rank_that_the_model_leaves_open(daemon: Daemon, model: Model) -> None:
    built, (attached,) = serve(daemon, model("any_rank"), "w")
    assert [each.shape for each in (*built.inputs, *built.outputs)] == [None, None]
    assert (len(built.canary_cases[0]["x"]), attached.canary) == (2, built.canary)
    for number, shape in enumerate(((), (3,), (2, 1, 2))):
        x = np.full(shape, 7, np.float32)
        daemon.ask("w", number, x=x)
        assert np.array_equal(daemon.answer("w", number), -x)


def test_from_hello_to_stop(daemon: Daemon, model: Model) -> None:
    path = model("wide")
    daemon.start("h", path)
    hello, _ = daemon.hear("h", Hello)
    assert hello.pid == str(daemon.children["h"].pid)
    assert hello.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert hello.versions["weightd"] == VERSION
    assert set(hello.versions) == {"weightd", "python", "numpy", ENGINE}
    assert not hello.traits.pids_fixed_at_build
    daemon.tell("h", Build(()))
    built, _ = daemon.hear("h", Built)
    assert built.handle == str(daemon.directory / "store")
    assert (built.inputs[0].shape, built.outputs[0].shape) == ((-1, 1024), (-1, 1024))
    assert built.canary_cases == ({"x": (1, 1024)}, {"x": (2, 1024)})

    daemon.start("w", path)
    daemon.hear("w", Hello)
    daemon.tell("w", Attach(built.handle, built.canary_cases))
    attached, _ = daemon.hear("w", Attached)
    assert attached.canary == built.canary
    assert built.shared_bytes >= attached.shared_bytes >= 4 * MIB - 64 * 1024
    assert attached.note == ""
    daemon.tell("h", Settle())

    i, j = np.ogrid[:1024, :1024]
    weights = ((i + 3 * j) % 5 - 2).astype(np.float32)
    for size in (1, 64, 3, 3):  # 64: 256 KiB, which is not copied into the message
        x = (np.arange(size * 1024) % 7 - 3).astype(np.float32).reshape(size, 1024)
        daemon.ask("w", size, x=x)
        assert np.array_equal(daemon.answer("w", size), x @ weights)
    assert daemon.stop("w") == exits.OK
    assert daemon.stop("h") == exits.OK


def test_when_memory_runs_out_it_goes_before_the_daemon(daemon: Daemon, model: Model) -> None:
    own = int(Path("/proc/self/oom_score_adj").read_text("ascii"))
    for name, role, above in (("h", "holder", 200), ("w", "worker", 400)):
        daemon.start(name, model("relu"), "--role", role)
        daemon.hear(name, Hello)
        score = Path(f"/proc/{daemon.children[name].pid}/oom_score_adj").read_text("ascii")
        assert int(score) == min(own + above, 1000)


def test_what_an_engine_makes_in_its_first_predict_is_shared_too(daemon: Daemon, model: Model) -> None:
    """MindSpore Lite rearranges the weights of a convolution then. They are a quarter of what is shared here."""
    built, attached = serve(daemon, model("convolution"), "w1", "w2")
    assert built.shared_bytes > 2 * MIB
    for each in attached:
        assert each.canary == built.canary
        assert each.shared_bytes > 0.9 * built.shared_bytes


def test_without_a_store_the_worker_serves_and_says_why_nothing_is_shared(daemon: Daemon, model: Model) -> None:
    built, _ = serve(daemon, model("relu"))
    assert (built.handle, built.note, built.is_loss) == (
        "",
        "weights are not shared: the model has no memory of 128 KiB or more in one piece",
        False,
    )
    assert not (daemon.directory / "store").exists()
    for name, handle in (("w1", ""), ("w2", str(daemon.directory / "gone"))):
        daemon.start(name, model("relu"))
        daemon.hear(name, Hello)
        daemon.tell(name, Attach(handle, built.canary_cases))
        attached, _ = daemon.hear(name, Attached)
        assert (attached.canary, attached.shared_bytes) == (built.canary, 0)
        # Why there is none, the holder has said.
        assert attached.note.startswith("weights are not shared: ") if handle else attached.note == ""
        daemon.ask(name, 1, x=np.array([[-1, 2, -3, 4]], np.float32))
        assert daemon.answer(name, 1).tolist() == [[0, 2, 0, 4]]


def test_a_store_that_cannot_be_settled_costs_a_warning(daemon: Daemon, model: Model) -> None:
    serve(daemon, model("wide"))
    (daemon.directory / "store").unlink()
    daemon.tell("h", Settle())
    assert daemon.stop("h") == exits.OK
    assert "WARNING weightd.worker: the page store's cold pages stay in memory: " in daemon.log("h")


def test_a_store_that_cannot_be_written_costs_only_memory(daemon: Daemon, model: Model) -> None:
    (daemon.directory / "store").write_bytes(b"somebody else's")
    built, _ = serve(daemon, model("wide"))
    assert (built.handle, built.shared_bytes) == ("", 0)
    assert built.note.startswith("weights are not shared: ")
    assert built.is_loss
    assert daemon.stop("h") == exits.OK


def test_a_request_that_the_engine_cannot_run(daemon: Daemon, model: Model) -> None:
    """ONNX Runtime is as good as before; a MindSpore Lite model is not, so its process answers nothing more."""
    serve(daemon, model("two_batches"), "w")
    two, three = np.ones((2, 4), np.float32), np.ones((3, 4), np.float32)
    daemon.ask("w", 1, a=two, b=two)
    assert daemon.answer("w", 1).tolist() == (two * 2).tolist()
    daemon.ask("w", 2, a=two, b=three)
    daemon.ask("w", 3, a=three, b=three)
    failed, _ = daemon.hear("w", Failed)
    assert failed.request == 2
    if ENGINE == "onnxruntime":
        assert (failed.code, failed.leaving) == ("INVALID_ARGUMENT", False)
        assert daemon.answer("w", 3).tolist() == (three * 2).tolist()
        assert daemon.stop("w") == exits.OK
    else:
        assert (failed.code, failed.leaving) == ("INTERNAL", True)
        assert failed.error.startswith("predict failed!: InferShape fail!")
        assert daemon.stop("w") == exits.SPOILT
        with pytest.raises(zmq.Again):
            daemon.socket.recv(zmq.NOBLOCK)


def test_a_model_that_cannot_be_built_is_told_with_its_cause(daemon: Daemon, onnx: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.mindir"
    bad.write_bytes(b"this is not a model\n" * 100)
    daemon.start("h", bad if ENGINE == "mindspore_lite" else onnx / "strings.onnx")
    daemon.hear("h", Hello)
    daemon.tell("h", Build(()))
    broken, _ = daemon.hear("h", Broken)
    assert broken.cause.startswith(("build_from_file failed! Error is Common error code.: ", "words: tensor(string) "))
    assert daemon.stop("h") == exits.CANNOT_BUILD
    assert f"ERROR weightd.worker: {broken.cause}\n" in daemon.log("h")


@pytest.mark.parametrize("content", [None, b""])
def test_a_model_that_cannot_be_read_is_told_with_its_name(daemon: Daemon, tmp_path: Path, content: Any) -> None:
    bad = tmp_path / "bad.onnx"
    if content is not None:
        bad.write_bytes(content)
    daemon.start("h", bad)
    broken, _ = daemon.hear("h", Broken)
    assert broken.cause.startswith(f"{bad}: ")
    assert daemon.stop("h") == exits.CANNOT_BUILD


@pytest.mark.skipif(importlib.util.find_spec(OTHER) is not None, reason="this interpreter has both engines")
def test_an_engine_that_this_interpreter_has_not_is_told_with_a_hint(daemon: Daemon, model: Model) -> None:
    daemon.start("h", model("relu"), engine=OTHER)
    broken, _ = daemon.hear("h", Broken)
    assert broken.cause.startswith(f"{sys.executable}: No module named '{OTHER}'; install ")
    assert daemon.stop("h") == exits.NO_ENGINE
    assert "Traceback" not in daemon.log("h")


def test_an_engine_whose_import_fails_in_any_way_is_told(
    daemon: Daemon, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{ENGINE}.py").write_text("raise ValueError('numpy.ndarray size changed')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    daemon.start("h", model("relu"))
    broken, _ = daemon.hear("h", Broken)
    assert broken.cause == f"{sys.executable}: numpy.ndarray size changed"
    assert daemon.stop("h") == exits.NO_ENGINE
    assert "Traceback" in daemon.log("h")


def test_an_order_that_breaks_the_protocol_ends_it_with_a_traceback(daemon: Daemon, model: Model) -> None:
    daemon.start("h", model("relu"))
    daemon.hear("h", Hello)
    daemon.socket.send_multipart([b"h", b"\xc1"])
    assert daemon.children["h"].wait(30) == exits.FAILED
    assert "Traceback" in daemon.log("h")
    assert "RemoteProtocolError" in daemon.log("h")


def test_ctrl_c_is_the_daemons_business(daemon: Daemon, model: Model) -> None:
    # A shell may have started the tests with SIGINT ignored, which children inherit.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        serve(daemon, model("relu"))
    finally:
        signal.signal(signal.SIGINT, before)
    daemon.children["h"].send_signal(signal.SIGINT)
    daemon.tell("h", Settle())
    assert daemon.stop("h") == exits.OK
    assert "KeyboardInterrupt" not in daemon.log("h")


def test_sigterm_ends_it_even_while_it_waits(daemon: Daemon, model: Model) -> None:
    daemon.start("h", model("relu"))
    daemon.hear("h", Hello)
    daemon.children["h"].terminate()
    assert daemon.children["h"].wait(30) == -signal.SIGTERM


def test_a_child_of_somebody_else_ends_at_once_and_says_nothing_to_the_daemon(daemon: Daemon, model: Model) -> None:
    daemon.start("h", model("relu"), parent=1)
    assert daemon.children["h"].wait(30) == 1
    assert f"expected to be a child of 1, but the parent is {os.getpid()}" in daemon.log("h")
    with pytest.raises(zmq.Again):
        daemon.socket.recv(zmq.NOBLOCK)
