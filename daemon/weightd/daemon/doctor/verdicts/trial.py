"""The verdicts on a self-test. No I/O."""

from __future__ import annotations

from weightd.daemon.doctor.trial.children import ChildError, Died, Hung
from weightd.daemon.doctor.trial.trial import Trial, second_copy_bytes
from weightd.daemon.doctor.verdicts.finding import Finding, failed, passed, untestable
from weightd.daemon.doctor.verdicts.host import mib
from weightd.daemon.engines.ascend import MAX_PROCESSES
from weightd.protocol.messages.children import Attached, Built

BUILD = "sharing: build"
ATTACH = "sharing: attach"
ANSWER = "sharing: same answer"
MEMORY = "sharing: memory once"
LATER = "sharing: later worker"
STRANGER = "sharing: stranger"
DEATH = "sharing: holder's death"
NAMES = (BUILD, ATTACH, ANSWER, MEMORY, LATER, STRANGER, DEATH)

_SPARES = "weightd then replaces lost workers by spares and new generations: set spares for each device"
_NO_TRIAL = "weightd doctor --model FILE.mindir shares the weights of a model among real processes"

# Of the library's text, when the driver refuses an import.
_IMPORT = "import from shareable handle"

# What the native log says, and what is to be done about it.
_ADVICE = (
    ("207001", "the device is out of memory: free some, or use a smaller model (see the line device memory)"),
    ("open device", f"the device takes no further process: it has {MAX_PROCESSES}, or is not there (see processes)"),
    (_IMPORT, "the driver refuses the import: a virtual instance does, and so does one whose list lacks the pid"),
    (
        "Set pid to shareable_handle",
        "the driver cannot list pids: driver and CANN must be of versions that fit together",
    ),
    ("207000", "the driver does not know this call: update driver and CANN to versions that fit together"),
)
_LOG = "the first error of the native log is the cause; see docs/ascend.md, trouble-shooting"
_HANG = "npu-smi info shows the device's health, CANN's own log is in ~/ascend/log; a model that needs longer: --limit"
_CRASH = "the library or the driver crashed: CANN's own log is in ~/ascend/log, the kernel's in dmesg"


def judge(trial: Trial, free_before: int | None) -> list[Finding]:
    """Return a finding for each of `NAMES`.

    Args:
        trial: what happened.
        free_before: free bytes of the device before it, None if unknown.
    """
    built, attached = trial.build, trial.attach
    build = _build(trial)
    if not isinstance(built, Built) or not built.handle:
        return [build, *(_not_reached(name, "no handle to attach to") for name in NAMES[1:])]
    if not isinstance(attached, Attached):
        attach = _attach(attached)
        return [build, attach, *(_not_reached(name, "no worker has attached") for name in NAMES[2:])]
    return [
        build,
        passed(ATTACH, f"a second process uses {mib(attached.shared_bytes)} of the first one's"),
        _answer(built, attached),
        _memory(trial, built, attached, free_before),
        _later(trial, built),
        _stranger(trial),
        _death(trial, built),
    ]


def not_asked_for() -> list[Finding]:
    """What is to be said without a model."""
    return [untestable("sharing", "not tried", _NO_TRIAL)]


def not_tried(cause: str) -> list[Finding]:
    """What is to be said of each check when the self-test could not begin."""
    return [_not_reached(name, cause) for name in NAMES]


def survivors(pids: list[int]) -> list[Finding]:
    """A process that SIGKILL does not end waits in the driver."""
    if not pids:
        return []
    found = f"{', '.join(map(str, pids))} did not end after SIGKILL"
    return [failed("clean-up", found, "they wait in the driver: npu-smi info shows the device's health; see dmesg")]


def _not_reached(name: str, cause: str) -> Finding:
    return untestable(name, f"not reached: {cause}")


def _build(trial: Trial) -> Finding:
    if isinstance(trial.start, ChildError):
        return _failure(BUILD, trial.start)
    if isinstance(trial.build, ChildError):
        return _failure(BUILD, trial.build)
    if trial.build is None or not trial.build.handle:
        note = trial.build.note if trial.build else ""
        advice = "convert the model for Ascend with one OM node: not encrypted, not for weight updates, not in a group"
        return failed(BUILD, f"the library gave no handle{': ' if note else ''}{note}", advice)
    return passed(BUILD, f"{mib(trial.build.shared_bytes)} exported for {len(trial.start) - 1} processes")


def _attach(attached: ChildError | None) -> Finding:
    return _failure(ATTACH, attached) if attached else _not_reached(ATTACH, "the build")


def _answer(built: Built, attached: Attached) -> Finding:
    if not built.canary:
        # As `serve` says it.
        found = f"no canary: {built.canary_note}: nothing else shows that a worker computes on the right weights"
        return failed(ANSWER, found, "name an input with the key canary, or set sharing to off")
    if built.canary != attached.canary:
        found = f"holder {built.canary[:12]}, worker {attached.canary[:12]}"
        return failed(ANSWER, found, "do not share this model: the worker computes something else")
    return passed(ANSWER, f"holder and worker give {built.canary[:12]}")


def _memory(trial: Trial, built: Built, attached: Attached, free_before: int | None) -> Finding:
    taken = second_copy_bytes(built, attached)
    if taken is None or built.device is None or attached.device is None:
        return untestable(MEMORY, "the device's memory cannot be read", "compare npu-smi info before and after by hand")
    before = "unknown" if free_before is None else mib(free_before)
    found = (
        f"free {before} before, {mib(built.device.free_bytes)} after the build, "
        f"{mib(attached.device.free_bytes)} after the attach: the worker took {mib(taken)} beside "
        f"{mib(built.shared_bytes)} of weights"
    )
    if taken < built.shared_bytes:
        return passed(MEMORY, found)
    advice = "try a model whose weights are larger than what a process takes beside them, on a device that is idle"
    if not isinstance(trial.private, Attached) or trial.private.device is None:
        return untestable(MEMORY, f"{found}; a copy of its own could not be built to compare", advice)
    own = attached.device.free_bytes - trial.private.device.free_bytes
    found += f"; one with a copy of its own takes {mib(own)}"
    if own - taken >= built.shared_bytes // 2:
        return passed(MEMORY, found)
    return failed(MEMORY, found, f"the weights are taken again, or the device is in use by others: {advice}")


def _later(trial: Trial, built: Built) -> Finding:
    allowed = trial.allow
    if isinstance(allowed, ChildError):
        return _failure(LATER, allowed)
    if allowed is None:
        return _not_reached(LATER, "the holder")
    if allowed.error:
        return failed(LATER, f"the list of pids cannot grow: {allowed.error}", _SPARES)
    return _new(trial.new, built)


def _new(new: Attached | ChildError | None, built: Built) -> Finding:
    if new is None:
        return _not_reached(LATER, "the list")
    if isinstance(new, Attached):
        return _same(LATER, new, built, "a process that started after the build could be listed, and attached")
    if _IMPORT in str(new):
        return failed(LATER, f"it was put on the list, but not let in: {new}", _SPARES)
    return _failure(LATER, new)


def _stranger(trial: Trial) -> Finding:
    stranger = trial.stranger
    if isinstance(stranger, Attached):
        advice = "the list of pids protects nothing here: keep other users' processes off this device"
        return failed(STRANGER, "a process that is not on the list could attach", advice)
    if isinstance(stranger, (Died, Hung)):
        advice = "a process that is not on the list must be refused, and end so: report it with this output"
        return failed(STRANGER, str(stranger), advice)
    if stranger is None:
        return _not_reached(STRANGER, "the list")
    if _IMPORT not in str(stranger):
        return untestable(STRANGER, f"it failed, but not for its number: {stranger}", _LOG)
    return passed(STRANGER, f"refused: {stranger}")


def _death(trial: Trial, built: Built) -> Finding:
    if isinstance(trial.before, ChildError):
        return _failure(DEATH, trial.before)
    if trial.before is None or trial.after is None or trial.late is None:
        return _not_reached(DEATH, "the worker")
    if isinstance(trial.after, ChildError):
        return passed(DEATH, f'strict: the worker cannot go on, so holder_loss = "strict" ({trial.after})')
    if trial.after != trial.before:
        return passed(DEATH, 'strict: the worker gave another answer, without an error, so holder_loss = "strict"')
    counted = 'reference-counted: the worker goes on with the same answer, holder_loss = "frozen" is possible'
    if isinstance(trial.late, Attached):
        return _same(DEATH, trial.late, built, f"{counted}; one that was on the list could still attach")
    return passed(DEATH, f"{counted}; one that was on the list could not attach any more ({trial.late})")


def _same(name: str, attached: Attached, built: Built, found: str) -> Finding:
    if attached.canary == built.canary:
        return passed(name, found)
    return failed(name, f"{found}, but gives another answer", "do not share this model: that worker is wrong")


def _failure(name: str, error: ChildError) -> Finding:
    text = str(error)
    other = _HANG if isinstance(error, Hung) else _CRASH if isinstance(error, Died) else _LOG
    return failed(name, text, next((advice for sign, advice in _ADVICE if sign in text), other))
