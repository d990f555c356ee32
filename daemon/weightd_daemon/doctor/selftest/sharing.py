"""Self-test of weight sharing on a card: real workers share weights, and try operations that the driver must refuse.

The self-test runs `python -m weightd_worker` and sends it the same messages as the daemon. A separate test program
would show only what MindSpore Lite can do. This self-test shows what weightd can do with the library, including
weightd's engine code, self-test and evaluation of the native log. Snapshots, restarts and queues, which only the daemon
has, are left out, because they do not use the card.
"""

from __future__ import annotations

import argparse
import logging
import math
import struct
from collections.abc import Mapping, Sequence

from weightd_common.modelfiles.files import ModelFileError, model_files
from weightd_daemon.config import selftest as selftest_config
from weightd_daemon.doctor.findings import Findings, Verdict, failed, passed, untestable
from weightd_daemon.doctor.interpreter import InterpreterReport
from weightd_daemon.doctor.selftest.processes import (
    ChildError,
    ChildExited,
    ChildTimedOut,
    ProtocolViolation,
    SelfTestProcesses,
)
from weightd_daemon.engines.ranktable import MAX_PROCESSES
from weightd_daemon.generations.selftest_search import SelfTestSearch, describe_cases
from weightd_daemon.generations.spec import SelfTestSpec
from weightd_daemon.platform.memory import MIB
from weightd_daemon.processes.spec import WorkerProgram
from weightd_protocol.datatypes import ITEM_BYTES
from weightd_protocol.messages.inference import RequestDescription, TensorSignature, TensorSpec
from weightd_protocol.messages.worker import Attach, Attached, Built, Hello, Ping, Pong, Predict, PredictResult
from weightd_protocol.messages.worker_common import AllowAttach, AttachAllowed, SelfTestCase

_log = logging.getLogger("weightd.doctor")

HOLDER = "holder"
WORKER = "worker"
LATE_WORKER = "late worker"  # on the list of pids at the build; attaches after the holder has exited
NEW_WORKER = "new worker"  # starts after the build
UNLISTED_WORKER = "unlisted worker"  # never on the list of pids
PRIVATE_WORKER = "private worker"  # builds its own copy of the weights

BUILD = "sharing: build"
ATTACH = "sharing: attach"
ANSWER = "sharing: same answer"
MEMORY = "sharing: memory once"
LATER_WORKER = "sharing: later worker"
UNLISTED = "sharing: unlisted worker"
HOLDER_EXIT = "sharing: holder exit"
CHECK_NAMES = (BUILD, ATTACH, ANSWER, MEMORY, LATER_WORKER, UNLISTED, HOLDER_EXIT)
"""The names of the self-test's checks, in the order of its steps."""

_SPARES_ADVICE = "weightd replaces lost workers only by spares and new generations: set spares for each device"
_MODEL_ADVICE = "to test sharing between real processes, run weightd doctor --model FILE.mindir"

# Part of MindSpore Lite's error text when the driver refuses to import shared memory.
_IMPORT_ERROR = "import from shareable handle"

# Texts in the native log that identify an error, and the advice for each error.
_ADVICE_BY_ERROR = (
    ("207001", "the device is out of memory: free some, or use a smaller model (see the line device memory)"),
    ("open device", f"the device has {MAX_PROCESSES} processes and accepts no more, or does not exist (see processes)"),
    (
        _IMPORT_ERROR,
        "the driver refuses the import: the device is a virtual instance, or the list of pids lacks the process",
    ),
    (
        "Set pid to shareable_handle",
        "the driver cannot list pids: install matching versions of the driver and CANN",
    ),
    ("207000", "the driver does not support this call: update the driver and CANN to matching versions"),
)
_LOG_ADVICE = "the first error of the native log is the cause; see docs/ascend.md, trouble-shooting"
_HANG_ADVICE = (
    "npu-smi info shows the device's health; CANN's own log is in ~/ascend/log; for a slow model, raise --limit"
)
_CRASH_ADVICE = "the library or the driver crashed: CANN's own log is in ~/ascend/log, the kernel's in dmesg"


AnswerFrames = tuple[bytes, ...]
"""A worker's answer: the digest of its outputs in the self-test, or one frame for each output of a predict."""


def check_sharing(options: argparse.Namespace, environment: Mapping[str, str], report: InterpreterReport) -> Findings:
    """Run the self-test with the model that the command line names; return the verdict of each check."""
    if not options.model:
        return {"sharing": untestable("not tested", _MODEL_ADVICE)}
    # Of the report's errors, only a missing library prevents the test. For others, the worker's own error text says
    # more.
    if report.error("library"):
        return not_run("the library cannot be imported")
    try:
        model_files(options.model)
    except ModelFileError as error:
        return not_run(str(error))
    program = WorkerProgram(
        options.python,
        "mindspore_lite",
        str(options.model.absolute()),
        f"ascend:{options.device}",
        sample=selftest_config.inputs_path(options.selftest),
        tolerance=options.selftest_tolerance,
        environment=environment,
    )
    with SelfTestProcesses(program, options.limit) as children:
        findings = run_selftest(
            children, SelfTestSpec.from_config(options.selftest), report.value("memory", "free_bytes")
        )
    return {**findings, **_check_survivors(children.survivors)}


def not_run(reason: str) -> Findings:
    """Return the verdicts of all checks for a self-test that could not start."""
    return dict.fromkeys(CHECK_NAMES, _not_reached(reason))


def run_selftest(children: SelfTestProcesses, selftest: SelfTestSpec, free_bytes_before: int | None) -> Findings:
    """Run all steps that do not depend on a failed step; return the verdict of each check.

    Args:
        children: starts the processes and exchanges messages with them.
        selftest: the self-test of the model.
        free_bytes_before: the free memory of the device before the self-test; None if unknown.
    """
    try:
        pids = _start_children(children, HOLDER, WORKER, LATE_WORKER)
        built = _build_model(children, (pids[WORKER], pids[LATE_WORKER]), selftest)
    except ChildError as error:
        return {**not_run("no handle to attach to"), BUILD: _child_failed(error)}
    if not built.handle:
        advice = "convert the model for Ascend with one OM node: not encrypted, not for weight updates, not in a group"
        no_handle = failed(f"the library exported no handle{': ' if built.note else ''}{built.note}", advice)
        return {**not_run("no handle to attach to"), BUILD: no_handle}
    findings = {BUILD: passed(f"{format_mib(built.shared_bytes)} exported for {len(pids) - 1} processes")}
    try:
        attached = _attach_worker(children, WORKER, built)
    except ChildError as error:
        return {**not_run("no worker has attached"), **findings, ATTACH: _child_failed(error)}
    findings[ATTACH] = passed(f"the worker uses {format_mib(attached.shared_bytes)} of the holder's memory")
    findings[ANSWER] = _check_answer(built, attached)
    findings[MEMORY] = _check_memory(children, built, attached, free_bytes_before)
    findings[LATER_WORKER] = _check_later_worker(children, built)
    findings[UNLISTED] = _check_unlisted_worker(children, built)
    findings[HOLDER_EXIT] = _check_holder_exit(children, built)
    return findings


def load_model(
    children: SelfTestProcesses, selftest: SelfTestSpec, *, should_attach: bool
) -> tuple[Built, Attached | None]:
    """Build a model in a holder and, if `should_attach`, attach a worker to the shared weights; run no further steps.

    Raises:
        ChildError: a step has failed.
    """
    pids = _start_children(children, HOLDER, *([WORKER] if should_attach else []))
    built = _build_model(children, tuple(pids[name] for name in pids if name != HOLDER), selftest)
    return built, _attach_worker(children, WORKER, built) if should_attach else None


def format_mib(size: int) -> str:
    """Format a size in bytes for people."""
    return f"{size / MIB:,.0f} MiB"


def _check_answer(built: Built, attached: Attached) -> Verdict:
    if not built.selftest_digest:
        # Use the text that `weightd serve` logs.
        found = (
            f"no self-test: {built.selftest_note}: only a self-test shows that a worker computes with the right weights"
        )
        return failed(found, 'set the key selftest to inputs that work, or set sharing = "off"')
    if built.selftest_digest != attached.selftest_digest:
        found = f"holder {built.selftest_digest[:12]}, worker {attached.selftest_digest[:12]}"
        return failed(found, "do not share this model: the worker's answer is wrong")
    return passed(f"holder and worker give {built.selftest_digest[:12]}")


def _check_memory(
    children: SelfTestProcesses, built: Built, attached: Attached, free_bytes_before: int | None
) -> Verdict:
    """Check that the worker took less memory than the weights, or clearly less than a worker with its own copy."""
    if built.device is None or attached.device is None:
        return untestable("the device's memory cannot be read", "compare npu-smi info before and after by hand")
    worker_bytes = built.device.free_bytes - attached.device.free_bytes
    before = "unknown" if free_bytes_before is None else format_mib(free_bytes_before)
    found = (
        f"free {before} before, {format_mib(built.device.free_bytes)} after the build, "
        f"{format_mib(attached.device.free_bytes)} after the attach: the worker took {format_mib(worker_bytes)} beside "
        f"{format_mib(built.shared_bytes)} of weights"
    )
    if worker_bytes < built.shared_bytes:
        return passed(found)
    advice = "test on an idle device, with a model whose weights are larger than the other memory of a process"
    try:
        private_copy = _attach_new_worker(children, PRIVATE_WORKER, built, handle="").device
    except ChildError:
        private_copy = None
    if private_copy is None:
        return untestable(f"{found}; cannot build a private copy for comparison", advice)
    private_copy_bytes = attached.device.free_bytes - private_copy.free_bytes
    found += f"; a worker with a private copy takes {format_mib(private_copy_bytes)}"
    if private_copy_bytes - worker_bytes >= built.shared_bytes // 2:
        return passed(found)
    return failed(found, f"the worker copied the weights, or other processes use the device: {advice}")


def _check_later_worker(children: SelfTestProcesses, built: Built) -> Verdict:
    """Check that a process that started after the build can be added to the list of pids, and can attach."""
    try:
        pids = _start_children(children, NEW_WORKER)
        children.send_order(HOLDER, AllowAttach((pids[NEW_WORKER],)))
        allowed = children.wait_for(HOLDER, AttachAllowed, "add a pid to the list")[0]
        if allowed.error:
            return failed(f"the list of pids cannot grow: {allowed.error}", _SPARES_ADVICE)
        try:
            attached = _attach_worker(children, NEW_WORKER, built)
        except ChildError as error:
            if _IMPORT_ERROR in str(error):
                return failed(
                    f"the process was added to the list of pids, but could not attach: {error}", _SPARES_ADVICE
                )
            raise
    except ChildError as error:
        return _child_failed(error)
    finally:
        children.kill(NEW_WORKER)
    return _check_same_answer(
        attached, built, "a process that started after the build could be added to the list of pids, and attached"
    )


def _check_unlisted_worker(children: SelfTestProcesses, built: Built) -> Verdict:
    """Check that a process that is not on the list of pids cannot attach."""
    try:
        _attach_new_worker(children, UNLISTED_WORKER, built, handle=built.handle)
    except (ChildExited, ChildTimedOut) as error:
        advice = (
            "expected an error for a process that is not on the list of pids; report this as a bug, with this output"
        )
        return failed(str(error), advice)
    except ChildError as error:
        if _IMPORT_ERROR not in str(error):
            return untestable(
                f"the attach of an unlisted process failed, but not because of its pid: {error}", _LOG_ADVICE
            )
        return passed(f"refused: {error}")
    advice = "the list of pids has no effect on this host: keep other users' processes off this device"
    return failed("a process that is not on the list of pids could attach", advice)


def _check_holder_exit(children: SelfTestProcesses, built: Built) -> Verdict:
    """Report whether, after the holder's exit, an attached worker can continue and a listed worker can still attach."""
    try:
        answer_before = _get_answer(children, built)
    except ChildError as error:
        return _child_failed(error)
    children.kill(HOLDER)
    try:
        answer_after = _get_answer(children, built)
    except ChildError as error:
        return passed(f'strict: the worker cannot continue, so set holder_loss = "strict" ({error})')
    if answer_after != answer_before:
        return passed('strict: the worker gave another answer, without an error, so set holder_loss = "strict"')
    counted = 'reference-counted: the worker continues with the same answer, so holder_loss = "frozen" is possible'
    try:
        late = _attach_worker(children, LATE_WORKER, built)
    except ChildError as error:
        return passed(f"{counted}; a listed process could no longer attach ({error})")
    return _check_same_answer(late, built, f"{counted}; a listed process could still attach")


def _check_same_answer(attached: Attached, built: Built, found: str) -> Verdict:
    if attached.selftest_digest == built.selftest_digest:
        return passed(found)
    return failed(f"{found}, but its answer differs", "do not share this model: the answer of this worker is wrong")


def _check_survivors(pids: Sequence[int]) -> Findings:
    """Return a failed check if processes did not exit after SIGKILL, because they hang in the driver."""
    if not pids:
        return {}
    found = f"processes {', '.join(map(str, pids))} have not exited after SIGKILL"
    return {
        "clean-up": failed(found, "the processes hang in the driver: npu-smi info shows the device's health; see dmesg")
    }


def _not_reached(reason: str) -> Verdict:
    return untestable(f"not reached: {reason}")


def _child_failed(error: ChildError) -> Verdict:
    text = str(error)
    known = (advice for sign, advice in _ADVICE_BY_ERROR if sign in text)
    other = _LOG_ADVICE
    if isinstance(error, ChildTimedOut):
        other = _HANG_ADVICE
    elif isinstance(error, ChildExited):
        other = _CRASH_ADVICE
    return failed(text, next(known, other))


def _start_children(children: SelfTestProcesses, *names: str) -> dict[str, str]:
    """Start children; return the driver's process number of each child by name."""
    for name in names:
        children.start(name)
    hellos = {name: children.wait_for(name, Hello, "start")[0] for name in names}
    if len({hello.sha256 for hello in hellos.values()}) > 1:
        raise ProtocolViolation("the model file has changed while the self-test read it")
    return {name: hello.engine_pid for name, hello in hellos.items()}


def _build_model(children: SelfTestProcesses, pids: tuple[str, ...], selftest: SelfTestSpec) -> Built:
    """Build in a holder. If self-test inputs crash it, try other inputs in a new holder, as `weightd serve` does."""
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
                    raise type(error)(f"{error} during the self-test with {tried}") from None
                raise
            _log.info("%s during the self-test with %s; trying other inputs", error, tried)
        children.kill(HOLDER)
        _start_children(children, HOLDER)


def _attach_worker(children: SelfTestProcesses, name: str, built: Built) -> Attached:
    children.send_order(name, Attach(built.handle, built.selftest_cases))
    return children.wait_for(name, Attached, "build with the handle")[0]


def _attach_new_worker(children: SelfTestProcesses, name: str, built: Built, handle: str) -> Attached:
    _start_children(children, name)
    try:
        children.send_order(name, Attach(handle, built.selftest_cases))
        return children.wait_for(name, Attached, "build with the handle" if handle else "build a private copy")[0]
    finally:
        # Kill the worker, because the next step needs its memory, and the device limits the number of processes.
        children.kill(name)


def _get_answer(children: SelfTestProcesses, built: Built) -> AnswerFrames:
    """Return the worker's answer to the self-test or, without a self-test, its outputs for generated inputs."""
    if built.selftest_digest:
        children.send_order(WORKER, Ping(run_selftest=True))
        return (children.wait_for(WORKER, Pong, "run the self-test")[0].selftest_digest.encode(),)
    specs, frames = make_inputs(built)
    children.send_order(WORKER, Predict(0, RequestDescription("selftest", specs)), frames)
    return tuple(bytes(memoryview(frame)) for frame in children.wait_for(WORKER, PredictResult, "predict")[1])


# --- Inputs without numpy -------------------------------------------------------------------------------------

# Values of generated inputs. Floats differ, so that the outputs depend on the weights. Integers are 0 and 1, which are
# valid indices of almost every embedding.
_FLOAT_VALUES = (0.5, -0.25, 1.0, -0.75, 0.125, -1.0, 0.875)
_FLOAT_CODES = {"FP16": "e", "FP32": "f", "FP64": "d"}


def make_inputs(built: Built) -> tuple[tuple[TensorSpec, ...], list[bytes]]:
    """Return generated inputs with shapes of the self-test or, without one, with 1 for each variable dimension."""
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
