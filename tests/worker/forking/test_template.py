"""Tests of templates (holders from which workers are forked) with the real ONNX Runtime."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Callable, ContextManager, Set, Tuple

import numpy as np
import pytest

from weightd_protocol.messages.inference import RequestDescription
from weightd_protocol.messages.worker import (
    Attach,
    Attached,
    Build,
    Built,
    Fork,
    Forked,
    Hello,
    Ping,
    Pong,
    Predict,
    Reconnected,
    Stop,
)
from weightd_worker import exit_codes

if TYPE_CHECKING:
    from tests.worker.forking.conftest import ForkChannel, Forking

Model = Callable[[str], Path]
Start = Callable[..., ContextManager["Forking"]]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="it needs ONNX Runtime")

MIB = 1 << 20


def holder(forking: Forking, model: Path, *more: str) -> Tuple[ForkChannel, Built]:
    """Start a holder that may become a template and build its model."""
    forking.fork("h", model, "--role", "holder", "--template", *more)
    channel = forking.channel("h")
    hello = channel.receive(Hello)
    assert (channel.pid, hello.engine_pid, hello.origin) == (forking.pids["h"], str(channel.pid), "forked")
    channel.send(Build(()))
    return channel, channel.receive(Built)


def worker(forking: Forking, name: str, model: Path, built: Built, of: ForkChannel) -> Tuple[Hello, Attached]:
    """Fork a worker and attach it."""
    forking.fork(name, model, of=of)
    hello = forking.channel(name).receive(Hello)
    forking.channel(name).send(Attach(built.handle, built.selftest_cases))
    attached = forking.channel(name).receive(Attached)
    assert attached.selftest_digest == built.selftest_digest
    return hello, attached


def test_forked_workers_share_model_and_answer_equally(served: Start, model: Model) -> None:
    import onnxruntime

    path = model("wide")
    with served() as forking:
        template, built = holder(forking, path)
        assert (built.handle, built.is_template, built.note) == ("", True, "")
        assert 4 * MIB <= built.shared_bytes < 8 * MIB
        x = np.random.default_rng(1).standard_normal((3, 1024)).astype(np.float32)
        (expected,) = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(["y"], {"x": x})
        for number in range(3):
            name = f"w{number}"
            hello, attached = worker(forking, name, path, built, template)
            assert (hello.origin, hello.origin_note) == ("template", "")
            assert attached.shared_bytes == built.shared_bytes
            assert forking.channel(name).ask(number, x=x).tobytes() == expected.tobytes()
        assert not (forking.daemon.directory / "store").exists()
        # The workers continue without the template.
        os.kill(template.pid, signal.SIGKILL)
        forking.wait("h")
        forking.channel("w0").send(Ping(run_selftest=True))
        pong = forking.channel("w0").receive(Pong)
        assert pong.selftest_digest == built.selftest_digest
        forking.channel("w0").send(Stop())
        assert forking.wait("w0") == exit_codes.OK


def test_template_obeys_next_daemon(served: Start, model: Model) -> None:
    with served() as forking:
        template, built = holder(forking, model("wide"))
        template.stream.close()
        template = forking.accept()
        template.receive(Reconnected)
        worker(forking, "w", model("wide"), built, template)
        template.send(Stop())
        assert forking.wait("h") == exit_codes.OK


@pytest.mark.parametrize(
    ("name", "more", "shares", "note"),
    [
        ("wide", ("--threads", "2"), True, ""),
        ("relu", ("--sharer-count", "2"), False, "weights are not shared: "),
        ("wide", ("--sharing", "off"), False, "sharing is off"),
    ],
)
def test_conditions_that_rule_out_a_template(
    served: Start, model: Model, name: str, more: Tuple[str, ...], shares: bool, note: str
) -> None:
    with served() as forking:
        channel, built = holder(forking, model(name), *more)
        assert (built.is_template, bool(built.handle), built.has_sharing_failed) == (False, shares, False)
        assert built.note.startswith(note)
        assert (built.shared_bytes > 4 * MIB - 64 * 1024) == shares
        words = "workers are not forked from this process: cannot fork: expected one thread, got 1 more: "
        assert (words in forking.daemon.log("h")) == shares
        channel.send(Fork("w", (), "/log"))
        assert channel.receive(Forked) == Forked("w", 0, "this process is not a template")


def test_random_model_has_no_template(served: Start, model: Model) -> None:
    with served() as forking:
        path = model("rarely_random")
        _, built = holder(forking, path)
        # The self-test does not show this, because its answers repeat.
        assert (built.selftest_digest != "", built.is_template, built.shared_bytes > 4 * MIB) == (True, False, True)
        drawn: Set[bytes] = set()
        for number, name in enumerate(("w1", "w2")):
            _, attached = worker(forking, name, path, built, forking.server)
            assert attached.shared_bytes > 4 * MIB
            drawn.add(forking.channel(name).ask(number, x=np.full((1, 1024), 1e30, np.float32)).tobytes())
        assert len(drawn) == 2


def test_template_rejects_predict(served: Start, model: Model) -> None:
    with served() as forking:
        template, _ = holder(forking, model("wide"))
        template.send(Predict(1, RequestDescription("m", ())))
        assert os.WEXITSTATUS(forking.wait("h")) == exit_codes.FAILED
        assert "expected no predict in a template" in forking.daemon.log("h")
