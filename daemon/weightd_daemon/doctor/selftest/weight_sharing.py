"""The self-test: weights are shared among real workers, and what should be refused is tried.

It drives `python -m weightd_worker` through its own protocol, with the messages that the daemon sends. A program made
for the test would show what the library can do; this shows what weightd will do with it, its engine, its self-test and
its reading of the native log included. What the daemon adds (snapshot, restarts, queue) does not touch the card.

This module acts and records; `checks` judge.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from weightd_daemon.doctor.selftest.processes import (
    ChildError,
    ChildExited,
    ChildTimedOut,
    ProtocolViolation,
    SelfTestProcesses,
)
from weightd_daemon.generations.selftest_search import SelfTestSearch, describe_cases
from weightd_daemon.generations.spec import SelfTestSpec
from weightd_protocol.datatypes import ITEM_BYTES
from weightd_protocol.messages.inference import RequestDescription, TensorSignature, TensorSpec
from weightd_protocol.messages.worker import (
    AllowAttach,
    Attach,
    AttachAllowed,
    Attached,
    Built,
    Hello,
    Ping,
    Pong,
    Predict,
    PredictResult,
)
from weightd_protocol.messages.worker_common import SelfTestCase

T = TypeVar("T")

_log = logging.getLogger("weightd.doctor")

HOLDER = "holder"
WORKER = "worker"
LATE_WORKER = "late worker"  # listed at the build, attaches after the holder's death
NEW_WORKER = "new worker"  # starts after the build
UNLISTED_WORKER = "unlisted worker"  # is never listed
PRIVATE_WORKER = "private worker"  # takes a copy of its own

AnswerFrames = tuple[bytes, ...]
"""The digest of the self-test's, or the outputs of a predict: a frame each."""


@dataclass
class SelfTestReport:
    """What became of each step: what the child answered or why it did not; None where it did not come to that.

    Attributes:
        start_result: holder, worker and late worker said hello, each with its number in the driver.
        build_result: the holder built with the numbers of the two others.
        attach_result: the worker attached.
        private_copy_result: a process took a copy of its own, which is only tried if the figures leave a doubt.
        allow_result: the holder put a process on the list that was started after the build.
        new_worker_result: that process attached.
        unlisted_result: a process that is not on the list attached, which it must not.
        answer_before_exit: the worker's answer while the holder lived.
        answer_after_exit: its answer to the same after the holder was killed.
        late_worker_result: a process attached after that, which was on the list.
    """

    start_result: dict[str, str] | ChildError = field(default_factory=dict[str, str])
    build_result: Built | ChildError | None = None
    attach_result: Attached | ChildError | None = None
    private_copy_result: Attached | ChildError | None = None
    allow_result: AttachAllowed | ChildError | None = None
    new_worker_result: Attached | ChildError | None = None
    unlisted_result: Attached | ChildError | None = None
    answer_before_exit: AnswerFrames | ChildError | None = None
    answer_after_exit: AnswerFrames | ChildError | None = None
    late_worker_result: Attached | ChildError | None = None


def run_selftest(children: SelfTestProcesses, selftest: SelfTestSpec) -> SelfTestReport:
    """Take all steps, in the order of `SelfTestReport`, as far as one does not need another that has failed."""
    report = SelfTestReport()
    report.start_result = _attempt(lambda: _start_children(children, HOLDER, WORKER, LATE_WORKER))
    if isinstance(report.start_result, ChildError):
        return report
    pids = (report.start_result[WORKER], report.start_result[LATE_WORKER])
    built = report.build_result = _attempt(lambda: _build_model(children, pids, selftest))
    if isinstance(built, ChildError) or not built.handle:
        return report
    attached = report.attach_result = _attempt(lambda: _attach_worker(children, WORKER, built))
    if isinstance(attached, ChildError):
        return report
    if is_sharing_doubtful(built, attached):
        report.private_copy_result = _attempt(lambda: _attach_new_worker(children, PRIVATE_WORKER, built, handle=""))
    _test_pid_list(children, report, built)
    _test_holder_exit(children, report, built)
    return report


def load_model(
    children: SelfTestProcesses, selftest: SelfTestSpec, *, should_attach: bool
) -> tuple[Built, Attached | None]:
    """Take the first steps alone.

    Build in a holder and, if `should_attach`, in a worker with what the holder has shared.

    Raises:
        ChildError: of the step that failed.
    """
    pids = _start_children(children, HOLDER, *([WORKER] if should_attach else []))
    built = _build_model(children, tuple(pids[name] for name in pids if name != HOLDER), selftest)
    return built, _attach_worker(children, WORKER, built) if should_attach else None


def attach_bytes(built: Built, attached: Attached) -> int | None:
    """Return what an attach took on the device after the build; None where nobody can tell."""
    if built.device is None or attached.device is None:
        return None
    return built.device.free_bytes - attached.device.free_bytes


def is_sharing_doubtful(built: Built, attached: Attached) -> bool:
    """Whether what the worker took beside the weights could be as much as the weights: a small model."""
    worker_bytes = attach_bytes(built, attached)
    return worker_bytes is not None and worker_bytes >= built.shared_bytes


def _test_pid_list(children: SelfTestProcesses, report: SelfTestReport, built: Built) -> None:
    """The list grows by one that started later; one that is not on it is refused."""
    report.allow_result = _attempt(lambda: _allow_new_worker(children))
    if isinstance(report.allow_result, AttachAllowed) and not report.allow_result.error:
        report.new_worker_result = _attempt(lambda: _attach_worker(children, NEW_WORKER, built))
    children.kill(NEW_WORKER)
    report.unlisted_result = _attempt(lambda: _attach_new_worker(children, UNLISTED_WORKER, built, handle=built.handle))


def _test_holder_exit(children: SelfTestProcesses, report: SelfTestReport, built: Built) -> None:
    report.answer_before_exit = _attempt(lambda: _get_answer(children, built))
    if isinstance(report.answer_before_exit, ChildError):
        return
    children.kill(HOLDER)
    report.answer_after_exit = _attempt(lambda: _get_answer(children, built))
    report.late_worker_result = _attempt(lambda: _attach_worker(children, LATE_WORKER, built))


def _attempt(step: Callable[[], T]) -> T | ChildError:
    try:
        return step()
    except ChildError as error:
        return error


def _start_children(children: SelfTestProcesses, *names: str) -> dict[str, str]:
    """Start these; return their numbers in the driver."""
    for name in names:
        children.start(name)
    hellos = {name: children.wait_for(name, Hello, "start")[0] for name in names}
    if len({hello.sha256 for hello in hellos.values()}) > 1:
        raise ProtocolViolation("the model file has changed while the self-test read it")
    return {name: hello.engine_pid for name, hello in hellos.items()}


def _build_model(children: SelfTestProcesses, pids: tuple[str, ...], selftest: SelfTestSpec) -> Built:
    """Build; a holder that is lost in its search for a self-test is followed by another one, as in `serve`."""
    search = SelfTestSearch(selftest)
    while True:
        children.send_order(HOLDER, search.build_message(pids))
        try:
            return children.wait_for(
                HOLDER, Built, "build with a list of pids" if pids else "build", search.on_announce_selftest
            )[0]
        except ChildError as error:
            from_outside = isinstance(error, ChildExited) and error.exit_cause.is_external
            tried = describe_cases(search.current_cases)
            if not search.on_holder_lost(has_timed_out=isinstance(error, ChildTimedOut), is_external=from_outside):
                if tried:
                    raise type(error)(f"{error}; it ran the self-test, {tried}") from None
                raise
            _log.info("%s; it ran %s", error, tried)
        children.kill(HOLDER)
        _start_children(children, HOLDER)


def _attach_worker(children: SelfTestProcesses, name: str, built: Built) -> Attached:
    children.send_order(name, Attach(built.handle, built.selftest_cases))
    return children.wait_for(name, Attached, "build with the handle")[0]


def _attach_new_worker(children: SelfTestProcesses, name: str, built: Built, handle: str) -> Attached:
    _start_children(children, name)
    try:
        children.send_order(name, Attach(handle, built.selftest_cases))
        return children.wait_for(name, Attached, "build with the handle" if handle else "build a copy of its own")[0]
    finally:
        # Its place and memory are given back before the next step takes some.
        children.kill(name)


def _allow_new_worker(children: SelfTestProcesses) -> AttachAllowed:
    pids = _start_children(children, NEW_WORKER)
    children.send_order(HOLDER, AllowAttach((pids[NEW_WORKER],)))
    return children.wait_for(HOLDER, AttachAllowed, "put one more pid on the list")[0]


def _get_answer(children: SelfTestProcesses, built: Built) -> AnswerFrames:
    """Run the self-test, whose answer counts as the same within the tolerance; or ask what can be made up here."""
    if built.selftest_digest:
        children.send_order(WORKER, Ping(run_selftest=True))
        return (children.wait_for(WORKER, Pong, "run the self-test")[0].selftest_digest.encode(),)
    specs, frames = make_inputs(built)
    children.send_order(WORKER, Predict(0, RequestDescription("selftest", specs)), frames)
    return tuple(bytes(memoryview(frame)) for frame in children.wait_for(WORKER, PredictResult, "predict")[1])


# --- An input without numpy -------------------------------------------------------------------------------------

# Values that differ, so that weights matter; for integers 0 and 1, indices that every embedding has.
_FLOAT_VALUES = (0.5, -0.25, 1.0, -0.75, 0.125, -1.0, 0.875)
_FLOAT_CODES = {"FP16": "e", "FP32": "f", "FP64": "d"}


def make_inputs(built: Built) -> tuple[tuple[TensorSpec, ...], list[bytes]]:
    """Return an input of the model, of a shape that it is known to run with."""
    case = built.selftest_cases[0] if built.selftest_cases else {}
    specs = tuple(_tensor_spec(each, case) for each in built.inputs)
    return specs, [_tensor_frame(each.datatype, math.prod(each.shape)) for each in specs]


def _tensor_spec(tensor: TensorSignature, case: SelfTestCase) -> TensorSpec:
    shape = case.get(tensor.name, tuple(1 if dim < 0 else dim for dim in tensor.shape or ()))
    return TensorSpec(tensor.name, tensor.datatype, shape)


def _tensor_frame(datatype: str, count: int) -> bytes:
    period = _byte_pattern(datatype)
    size = count * ITEM_BYTES[datatype]
    return (period * (size // len(period) + 1))[:size]


def _byte_pattern(datatype: str) -> bytes:
    if datatype in _FLOAT_CODES:
        return struct.pack(f"<{len(_FLOAT_VALUES)}{_FLOAT_CODES[datatype]}", *_FLOAT_VALUES)
    ones: Sequence[int] = (0, 1, 1)
    return b"".join(value.to_bytes(ITEM_BYTES[datatype], "little") for value in ones)
