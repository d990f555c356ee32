"""The self-test: weights are shared among real workers, and what should be refused is tried.

It drives `python -m weightd.worker` through its own protocol, with the messages that the daemon sends. A program made
for the test would show what the library can do; this shows what weightd will do with it, its engine, its canary and
its reading of the native log included. What the daemon adds (snapshot, restarts, queue) does not touch the card.

This module acts and records; `verdicts` judge.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from weightd.daemon.doctor.trial.children import ChildError, Children, Confused, Died, Hung
from weightd.daemon.generations.plan import Canary
from weightd.daemon.generations.tries import Tries, described
from weightd.protocol.datatypes import ITEM_BYTES
from weightd.protocol.messages.children import (
    Allow,
    Allowed,
    Attach,
    Attached,
    Built,
    Hello,
    Ping,
    Pong,
    Predict,
    Result,
)
from weightd.protocol.messages.data import RequestDescription, TensorSignature, TensorSpec
from weightd.protocol.messages.findings import Case

T = TypeVar("T")

_log = logging.getLogger("weightd.doctor")

HOLDER = "holder"
WORKER = "worker"
LATE = "late worker"  # listed at the build, attaches after the holder's death
NEW = "new worker"  # starts after the build
STRANGER = "stranger"  # is never listed
PRIVATE = "private worker"  # takes a copy of its own

Answer = tuple[bytes, ...]
"""The digest of the canary's, or the outputs of a predict: a frame each."""


@dataclass
class Trial:
    """What became of each step: what the child answered or why it did not; None where it did not come to that.

    Attributes:
        start: holder, worker and late worker said hello, each with its number in the driver.
        build: the holder built with the numbers of the two others.
        attach: the worker attached.
        private: a process took a copy of its own, which is only tried if the figures leave a doubt.
        allow: the holder put a process on the list that was started after the build.
        new: that process attached.
        stranger: a process that is not on the list attached, which it must not.
        before: the worker's answer while the holder lived.
        after: its answer to the same after the holder was killed.
        late: a process attached after that, which was on the list.
    """

    start: dict[str, str] | ChildError = field(default_factory=dict[str, str])
    build: Built | ChildError | None = None
    attach: Attached | ChildError | None = None
    private: Attached | ChildError | None = None
    allow: Allowed | ChildError | None = None
    new: Attached | ChildError | None = None
    stranger: Attached | ChildError | None = None
    before: Answer | ChildError | None = None
    after: Answer | ChildError | None = None
    late: Attached | ChildError | None = None


def run(children: Children, canary: Canary) -> Trial:
    """Take all steps, in the order of `Trial`, as far as one does not need another that has failed."""
    trial = Trial()
    trial.start = _attempt(lambda: _start(children, HOLDER, WORKER, LATE))
    if isinstance(trial.start, ChildError):
        return trial
    pids = (trial.start[WORKER], trial.start[LATE])
    built = trial.build = _attempt(lambda: _build(children, pids, canary))
    if isinstance(built, ChildError) or not built.handle:
        return trial
    attached = trial.attach = _attempt(lambda: _attach(children, WORKER, built))
    if isinstance(attached, ChildError):
        return trial
    if is_doubtful(built, attached):
        trial.private = _attempt(lambda: _attach_new(children, PRIVATE, built, handle=""))
    _try_the_list(children, trial, built)
    _try_a_death(children, trial, built)
    return trial


def load(children: Children, canary: Canary, *, attaches: bool) -> tuple[Built, Attached | None]:
    """Take the first steps alone: build in a holder and, if `attaches`, in a worker with what the holder has shared.

    Raises:
        ChildError: of the step that failed.
    """
    pids = _start(children, HOLDER, *([WORKER] if attaches else []))
    built = _build(children, tuple(pids[name] for name in pids if name != HOLDER), canary)
    return built, _attach(children, WORKER, built) if attaches else None


def second_copy_bytes(built: Built, attached: Attached) -> int | None:
    """Return what an attach took on the device after the build; None where nobody can tell."""
    if built.device is None or attached.device is None:
        return None
    return built.device.free_bytes - attached.device.free_bytes


def is_doubtful(built: Built, attached: Attached) -> bool:
    """Whether what the worker took beside the weights could be as much as the weights: a small model."""
    taken = second_copy_bytes(built, attached)
    return taken is not None and taken >= built.shared_bytes


def _try_the_list(children: Children, trial: Trial, built: Built) -> None:
    """The list grows by one that started later; one that is not on it is refused."""
    trial.allow = _attempt(lambda: _allow(children))
    if isinstance(trial.allow, Allowed) and not trial.allow.error:
        trial.new = _attempt(lambda: _attach(children, NEW, built))
    children.end(NEW)
    trial.stranger = _attempt(lambda: _attach_new(children, STRANGER, built, handle=built.handle))


def _try_a_death(children: Children, trial: Trial, built: Built) -> None:
    trial.before = _attempt(lambda: _answer(children, built))
    if isinstance(trial.before, ChildError):
        return
    children.end(HOLDER)
    trial.after = _attempt(lambda: _answer(children, built))
    trial.late = _attempt(lambda: _attach(children, LATE, built))


def _attempt(step: Callable[[], T]) -> T | ChildError:
    try:
        return step()
    except ChildError as error:
        return error


def _start(children: Children, *names: str) -> dict[str, str]:
    """Start these; return their numbers in the driver."""
    for name in names:
        children.start(name)
    hellos = {name: children.hear(name, Hello, "start")[0] for name in names}
    if len({hello.sha256 for hello in hellos.values()}) > 1:
        raise Confused("the model file has changed while the self-test read it")
    return {name: hello.pid for name, hello in hellos.items()}


def _build(children: Children, pids: tuple[str, ...], canary: Canary) -> Built:
    """Build; a holder that is lost in its search for a canary is followed by another one, as in `serve`."""
    tries = Tries(canary)
    while True:
        children.order(HOLDER, tries.order(pids))
        try:
            return children.hear(HOLDER, Built, "build with a list of pids" if pids else "build", tries.told)[0]
        except ChildError as error:
            from_outside = isinstance(error, Died) and error.end.from_outside
            tried = described(tries.trying)
            if not tries.lost(is_slow=isinstance(error, Hung), from_outside=from_outside):
                if tried:
                    raise type(error)(f"{error}; it ran the canary, {tried}") from None
                raise
            _log.info("%s; it ran %s", error, tried)
        children.end(HOLDER)
        _start(children, HOLDER)


def _attach(children: Children, name: str, built: Built) -> Attached:
    children.order(name, Attach(built.handle, built.canary_cases))
    return children.hear(name, Attached, "build with the handle")[0]


def _attach_new(children: Children, name: str, built: Built, handle: str) -> Attached:
    _start(children, name)
    try:
        children.order(name, Attach(handle, built.canary_cases))
        return children.hear(name, Attached, "build with the handle" if handle else "build a copy of its own")[0]
    finally:
        # Its place and memory are given back before the next step takes some.
        children.end(name)


def _allow(children: Children) -> Allowed:
    pids = _start(children, NEW)
    children.order(HOLDER, Allow((pids[NEW],)))
    return children.hear(HOLDER, Allowed, "put one more pid on the list")[0]


def _answer(children: Children, built: Built) -> Answer:
    """Ask the canary, whose answer counts as the same if it is within the tolerance; or what can be made up here."""
    if built.canary:
        children.order(WORKER, Ping(canary=True))
        return (children.hear(WORKER, Pong, "run the canary")[0].canary.encode(),)
    specs, frames = inputs(built)
    children.order(WORKER, Predict(0, RequestDescription("trial", specs)), frames)
    return tuple(bytes(memoryview(frame)) for frame in children.hear(WORKER, Result, "predict")[1])


# --- An input without numpy -------------------------------------------------------------------------------------

# Values that differ, so that weights matter; for integers 0 and 1, indices that every embedding has.
_FLOATS = (0.5, -0.25, 1.0, -0.75, 0.125, -1.0, 0.875)
_FLOAT_CODES = {"FP16": "e", "FP32": "f", "FP64": "d"}


def inputs(built: Built) -> tuple[tuple[TensorSpec, ...], list[bytes]]:
    """Return an input of the model, of a shape that it is known to run with."""
    case = built.canary_cases[0] if built.canary_cases else {}
    specs = tuple(_spec(each, case) for each in built.inputs)
    return specs, [_frame(each.datatype, math.prod(each.shape)) for each in specs]


def _spec(tensor: TensorSignature, case: Case) -> TensorSpec:
    shape = case.get(tensor.name, tuple(1 if dim < 0 else dim for dim in tensor.shape or ()))
    return TensorSpec(tensor.name, tensor.datatype, shape)


def _frame(datatype: str, count: int) -> bytes:
    period = _period(datatype)
    size = count * ITEM_BYTES[datatype]
    return (period * (size // len(period) + 1))[:size]


def _period(datatype: str) -> bytes:
    if datatype in _FLOAT_CODES:
        return struct.pack(f"<{len(_FLOATS)}{_FLOAT_CODES[datatype]}", *_FLOATS)
    ones: Sequence[int] = (0, 1, 1)
    return b"".join(value.to_bytes(ITEM_BYTES[datatype], "little") for value in ones)
