"""The verdicts on a self-test. No I/O."""

from __future__ import annotations

from weightd_daemon.doctor.findings import Finding, failed, passed, untestable
from weightd_daemon.doctor.host import format_mib
from weightd_daemon.doctor.selftest.processes import ChildError, ChildExited, ChildTimedOut
from weightd_daemon.doctor.selftest.weight_sharing import SelfTestReport, attach_bytes
from weightd_daemon.engines.ranktable import MAX_PROCESSES
from weightd_protocol.messages.worker import Attached, Built

BUILD = "sharing: build"
ATTACH = "sharing: attach"
ANSWER = "sharing: same answer"
MEMORY = "sharing: memory once"
LATER_WORKER = "sharing: later worker"
UNLISTED_WORKER = "sharing: unlisted worker"
HOLDER_EXIT = "sharing: holder exit"
CHECK_NAMES = (BUILD, ATTACH, ANSWER, MEMORY, LATER_WORKER, UNLISTED_WORKER, HOLDER_EXIT)

_SPARES_ADVICE = "weightd then replaces lost workers by spares and new generations: set spares for each device"
_MODEL_ADVICE = "weightd doctor --model FILE.mindir shares the weights of a model among real processes"

# Of the library's text, when the driver refuses an import.
_IMPORT_ERROR = "import from shareable handle"

# What the native log says, and what is to be done about it.
_ADVICE_BY_ERROR = (
    ("207001", "the device is out of memory: free some, or use a smaller model (see the line device memory)"),
    ("open device", f"the device takes no further process: it has {MAX_PROCESSES}, or is not there (see processes)"),
    (_IMPORT_ERROR, "the driver refuses the import: a virtual instance does, and so does one whose list lacks the pid"),
    (
        "Set pid to shareable_handle",
        "the driver cannot list pids: driver and CANN must be of versions that fit together",
    ),
    ("207000", "the driver does not know this call: update driver and CANN to versions that fit together"),
)
_LOG_ADVICE = "the first error of the native log is the cause; see docs/ascend.md, trouble-shooting"
_HANG_ADVICE = (
    "npu-smi info shows the device's health, CANN's own log is in ~/ascend/log; a model that needs longer: --limit"
)
_CRASH_ADVICE = "the library or the driver crashed: CANN's own log is in ~/ascend/log, the kernel's in dmesg"


def evaluate(report: SelfTestReport, free_bytes_before: int | None) -> list[Finding]:
    """Return a finding for each of `CHECK_NAMES`.

    Args:
        report: what happened.
        free_bytes_before: free bytes of the device before it, None if unknown.
    """
    built, attached = report.build_result, report.attach_result
    build = _check_build(report)
    if not isinstance(built, Built) or not built.handle:
        return [build, *(_not_reached(name, "no handle to attach to") for name in CHECK_NAMES[1:])]
    if not isinstance(attached, Attached):
        attach = _check_attach(attached)
        return [build, attach, *(_not_reached(name, "no worker has attached") for name in CHECK_NAMES[2:])]
    return [
        build,
        passed(ATTACH, f"a second process uses {format_mib(attached.shared_bytes)} of the first one's"),
        _check_answer(built, attached),
        _check_memory(report, built, attached, free_bytes_before),
        _check_later_worker(report, built),
        _check_unlisted_worker(report),
        _check_holder_exit(report, built),
    ]


def not_requested() -> list[Finding]:
    """What is to be said without a model."""
    return [untestable("sharing", "not tried", _MODEL_ADVICE)]


def not_run(reason: str) -> list[Finding]:
    """What is to be said of each check when the self-test could not begin."""
    return [_not_reached(name, reason) for name in CHECK_NAMES]


def check_survivors(pids: list[int]) -> list[Finding]:
    """A process that SIGKILL does not end waits in the driver."""
    if not pids:
        return []
    found = f"{', '.join(map(str, pids))} did not end after SIGKILL"
    return [failed("clean-up", found, "they wait in the driver: npu-smi info shows the device's health; see dmesg")]


def _not_reached(name: str, reason: str) -> Finding:
    return untestable(name, f"not reached: {reason}")


def _check_build(report: SelfTestReport) -> Finding:
    if isinstance(report.start_result, ChildError):
        return _child_failed(BUILD, report.start_result)
    if isinstance(report.build_result, ChildError):
        return _child_failed(BUILD, report.build_result)
    if report.build_result is None or not report.build_result.handle:
        note = report.build_result.note if report.build_result else ""
        advice = "convert the model for Ascend with one OM node: not encrypted, not for weight updates, not in a group"
        return failed(BUILD, f"the library gave no handle{': ' if note else ''}{note}", advice)
    return passed(
        BUILD, f"{format_mib(report.build_result.shared_bytes)} exported for {len(report.start_result) - 1} processes"
    )


def _check_attach(attached: ChildError | None) -> Finding:
    return _child_failed(ATTACH, attached) if attached else _not_reached(ATTACH, "the build")


def _check_answer(built: Built, attached: Attached) -> Finding:
    if not built.selftest_digest:
        # As `serve` says it.
        found = f"no self-test: {built.selftest_note}: nothing else shows that a worker computes on the right weights"
        return failed(ANSWER, found, "name an input with the key selftest, or set sharing to off")
    if built.selftest_digest != attached.selftest_digest:
        found = f"holder {built.selftest_digest[:12]}, worker {attached.selftest_digest[:12]}"
        return failed(ANSWER, found, "do not share this model: the worker computes something else")
    return passed(ANSWER, f"holder and worker give {built.selftest_digest[:12]}")


def _check_memory(report: SelfTestReport, built: Built, attached: Attached, free_bytes_before: int | None) -> Finding:
    worker_bytes = attach_bytes(built, attached)
    if worker_bytes is None or built.device is None or attached.device is None:
        return untestable(MEMORY, "the device's memory cannot be read", "compare npu-smi info before and after by hand")
    before = "unknown" if free_bytes_before is None else format_mib(free_bytes_before)
    found = (
        f"free {before} before, {format_mib(built.device.free_bytes)} after the build, "
        f"{format_mib(attached.device.free_bytes)} after the attach: the worker took {format_mib(worker_bytes)} beside "
        f"{format_mib(built.shared_bytes)} of weights"
    )
    if worker_bytes < built.shared_bytes:
        return passed(MEMORY, found)
    advice = "try a model whose weights are larger than what a process takes beside them, on a device that is idle"
    if not isinstance(report.private_copy_result, Attached) or report.private_copy_result.device is None:
        return untestable(MEMORY, f"{found}; a copy of its own could not be built to compare", advice)
    private_copy_bytes = attached.device.free_bytes - report.private_copy_result.device.free_bytes
    found += f"; one with a copy of its own takes {format_mib(private_copy_bytes)}"
    if private_copy_bytes - worker_bytes >= built.shared_bytes // 2:
        return passed(MEMORY, found)
    return failed(MEMORY, found, f"the weights are taken again, or the device is in use by others: {advice}")


def _check_later_worker(report: SelfTestReport, built: Built) -> Finding:
    allowed = report.allow_result
    if isinstance(allowed, ChildError):
        return _child_failed(LATER_WORKER, allowed)
    if allowed is None:
        return _not_reached(LATER_WORKER, "the holder")
    if allowed.error:
        return failed(LATER_WORKER, f"the list of pids cannot grow: {allowed.error}", _SPARES_ADVICE)
    return _check_new_worker(report.new_worker_result, built)


def _check_new_worker(new_worker: Attached | ChildError | None, built: Built) -> Finding:
    if new_worker is None:
        return _not_reached(LATER_WORKER, "the list")
    if isinstance(new_worker, Attached):
        return _check_same_answer(
            LATER_WORKER, new_worker, built, "a process that started after the build could be listed, and attached"
        )
    if _IMPORT_ERROR in str(new_worker):
        return failed(LATER_WORKER, f"it was put on the list, but not let in: {new_worker}", _SPARES_ADVICE)
    return _child_failed(LATER_WORKER, new_worker)


def _check_unlisted_worker(report: SelfTestReport) -> Finding:
    unlisted_worker = report.unlisted_result
    if isinstance(unlisted_worker, Attached):
        advice = "the list of pids protects nothing here: keep other users' processes off this device"
        return failed(UNLISTED_WORKER, "a process that is not on the list could attach", advice)
    if isinstance(unlisted_worker, (ChildExited, ChildTimedOut)):
        advice = "a process that is not on the list must be refused, and end so: report it with this output"
        return failed(UNLISTED_WORKER, str(unlisted_worker), advice)
    if unlisted_worker is None:
        return _not_reached(UNLISTED_WORKER, "the list")
    if _IMPORT_ERROR not in str(unlisted_worker):
        return untestable(UNLISTED_WORKER, f"it failed for another reason than its pid: {unlisted_worker}", _LOG_ADVICE)
    return passed(UNLISTED_WORKER, f"refused: {unlisted_worker}")


def _check_holder_exit(report: SelfTestReport, built: Built) -> Finding:
    if isinstance(report.answer_before_exit, ChildError):
        return _child_failed(HOLDER_EXIT, report.answer_before_exit)
    if report.answer_before_exit is None or report.answer_after_exit is None or report.late_worker_result is None:
        return _not_reached(HOLDER_EXIT, "the worker")
    if isinstance(report.answer_after_exit, ChildError):
        return passed(
            HOLDER_EXIT, f'strict: the worker cannot go on, so holder_loss = "strict" ({report.answer_after_exit})'
        )
    if report.answer_after_exit != report.answer_before_exit:
        return passed(
            HOLDER_EXIT, 'strict: the worker gave another answer, without an error, so holder_loss = "strict"'
        )
    counted = 'reference-counted: the worker goes on with the same answer, holder_loss = "frozen" is possible'
    if isinstance(report.late_worker_result, Attached):
        return _check_same_answer(
            HOLDER_EXIT, report.late_worker_result, built, f"{counted}; one that was on the list could still attach"
        )
    return passed(
        HOLDER_EXIT, f"{counted}; one that was on the list could not attach any more ({report.late_worker_result})"
    )


def _check_same_answer(name: str, attached: Attached, built: Built, found: str) -> Finding:
    if attached.selftest_digest == built.selftest_digest:
        return passed(name, found)
    return failed(name, f"{found}, but gives another answer", "do not share this model: that worker is wrong")


def _child_failed(name: str, error: ChildError) -> Finding:
    text = str(error)
    other = (
        _HANG_ADVICE
        if isinstance(error, ChildTimedOut)
        else _CRASH_ADVICE
        if isinstance(error, ChildExited)
        else _LOG_ADVICE
    )
    return failed(name, text, next((advice for sign, advice in _ADVICE_BY_ERROR if sign in text), other))
