"""A generation: its processes, who of them is where, how they came to be, and what they save."""

from __future__ import annotations

from typing import Dict, Iterator, List, Optional, Tuple

from weightctl.text import clean, count, megabytes, milliseconds, paragraph, size, table
from weightd_common.load_text import progress_text
from weightd_protocol.messages.status import GenerationStatus, ProcessStatus

_HEADING = (
    "PROCESS",
    "ROLE",
    "STATE",
    "PID",
    "SERVED",
    "NOW",
    "P50 ms",
    "P99 ms",
    "PSS MB",
    "OWN MB",
    "SHARED MB",
)
_LEFT_COLUMNS = 3

# Who answers no request.
_NON_SERVING_ROLES = ("holder", "broker")

_ORIGIN_TEXTS = {"forked": "forked of the fork server", "template": "forked of the template"}
_MAX_NAMES = 8


def format_generation(generation: GenerationStatus, prefix: str) -> Iterator[str]:
    """Yield what is shown of a generation; `prefix` is what the names of its processes have in common."""
    state = generation.progress or generation.state
    sha256 = f", sha256 {clean(generation.sha256)[:12]}" if generation.sha256 else ""
    progress = progress_text(generation.load_fraction, generation.remaining_s)
    yield (
        f"  generation {generation.number} on {clean(generation.device)}:"
        f" {clean(state)}{progress and f', {progress}'}{sha256}"
    )
    if generation.reason:
        yield from paragraph("cause", generation.reason, "    ")
    if generation.selftest:
        yield from paragraph("self-test", generation.selftest, "    ")
    if generation.batching_note:
        yield from paragraph("rows", generation.batching_note, "    ")
    if generation.processes:
        yield from table(
            [_HEADING, *(_row(process, prefix) for process in generation.processes)], _LEFT_COLUMNS, "    "
        )
    for process in generation.processes:
        if process.note:
            yield from paragraph(_short(process.name, prefix), process.note, "    ")
    yield from _device_lines(generation, prefix)
    yield from _slice_lines(generation, prefix)
    yield from _concurrency_lines(generation, prefix)
    yield from _origin_lines(generation, prefix)
    if generation.note:
        yield from paragraph("note", generation.note, "    ")
    yield from _savings_lines(generation)


def _device_lines(generation: GenerationStatus, prefix: str) -> Iterator[str]:
    """Who runs on which device, where these are several: a paragraph for each."""
    names_by_device: Dict[str, List[str]] = {}
    for process in generation.processes:
        if process.device not in ("", generation.device):
            names_by_device.setdefault(process.device, []).append(_short(process.name, prefix))
    for device, names in names_by_device.items():
        yield from paragraph(f"on {clean(device)}", ", ".join(names), "    ")


def _slice_lines(generation: GenerationStatus, prefix: str) -> Iterator[str]:
    """What each rank has loaded, where there are ranks."""
    slices = [f"{_short(each.name, prefix)} {clean(each.sha256)[:12]}" for each in generation.processes if each.sha256]
    if slices:
        yield from paragraph("sha256 of slices", ", ".join(slices), "    ")


def _concurrency_lines(generation: GenerationStatus, prefix: str) -> Iterator[str]:
    """Who runs more than one predict at once: a paragraph for each number."""
    names_by_concurrency: Dict[int, List[str]] = {}
    for process in generation.processes:
        if process.concurrency > 1 and process.role not in _NON_SERVING_ROLES:
            names_by_concurrency.setdefault(process.concurrency, []).append(_short(process.name, prefix))
    for number, names in names_by_concurrency.items():
        yield from paragraph(f"{number} predicts at once", ", ".join(names), "    ")


def _origin_lines(generation: GenerationStatus, prefix: str) -> Iterator[str]:
    """How processes came to be, and why not otherwise: a paragraph for each way."""
    names_by_origin: Dict[Tuple[Optional[str], str], List[str]] = {}
    for process in generation.processes:
        names_by_origin.setdefault((process.origin, process.origin_note), []).append(_short(process.name, prefix))
    for (origin, note), names in names_by_origin.items():
        if origin is not None:
            who = ", ".join(names) if len(names) <= _MAX_NAMES else f"{len(names):,} processes"
            yield from paragraph(_ORIGIN_TEXTS.get(origin, clean(origin)), f"{who}{': ' if note else ''}{note}", "    ")


def _row(process: ProcessStatus, prefix: str) -> List[str]:
    is_serving = process.role not in _NON_SERVING_ROLES
    return [
        _short(process.name, prefix),
        process.role,
        clean(process.state),
        str(process.pid),
        f"{process.served:,}" if is_serving else "-",
        str(process.in_flight) if is_serving else "-",
        milliseconds(process.p50_us),
        milliseconds(process.p99_us),
        megabytes(process.pss_bytes),
        megabytes(process.private_bytes),
        megabytes(process.shared_bytes) if is_serving else "-",
    ]


def _short(name: str, prefix: str) -> str:
    """A process's name without what stands above it: tiny.1.w2 is w2."""
    return clean(name[len(prefix) :] if name.startswith(prefix) else name)


def _savings_lines(generation: GenerationStatus) -> Iterator[str]:
    if any(process.role == "rank" for process in generation.processes):
        return  # each has a slice that no other one has
    sharing = sum(1 for process in generation.processes if process.role != "holder" and process.shared_bytes)
    copy, saved = generation.copy_bytes, generation.saved_bytes
    workers = count(sharing, "worker")
    if not sharing:
        if any(process.state == "ready" for process in generation.processes):
            yield "    saves nothing: no worker shares its weights"
    elif copy is None or saved is None:
        yield f"    saves an unknown amount: {workers} on one copy, of which the kernel does not tell what is in memory"
    elif saved:
        own = size(saved + copy)
        yield f"    saves {size(saved)}: {workers} on one copy of {size(copy)} instead of {own} of their own"
    elif copy:
        yield f"    saves nothing yet: {workers} on one copy of {size(copy)}"
    else:
        yield f"    saves nothing yet: {workers} on one copy that is on disk until it is used"
