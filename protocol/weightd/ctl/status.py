"""`weightctl status`: the models, their processes, their memory, and what sharing saves."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any, Dict, Iterator, List, Optional, Tuple

from weightd.ctl import exits
from weightd.ctl.text import binary, clean, count, duration, megabytes, milliseconds, paragraph, size, table
from weightd.ctl.verb import Connect, NotReached, Verb
from weightd.protocol.errors import DeadlineExceeded, NotFound, Unavailable
from weightd.protocol.messages.status import (
    DeviceStatus,
    ForkServerStatus,
    GateStatus,
    GenerationStatus,
    MemoryLimit,
    ModelStatus,
    ProcessStatus,
    StatusResponse,
)

_DESCRIPTION = """\
Shows each model with its generations (one weight copy each) and their processes.

NOW is how many requests a process has under way. Latencies are the daemon's, from a request's
arrival to its answer, over the last answers. PSS is a process's proportional set size: its own
memory, and its share of what it shares with others; so the PSS of all processes adds up to what
the service takes. OWN is what no other process has: what its end would give back. SHARED is how
much of a worker's weights is memory that it has in common with the others. MB is 10^6 bytes.

A generation on several sets of cores, such as cpu:0 and cpu:1, is one "on cpu"; below its processes
it is told who of them is on which.

Processes are spawned with an interpreter of their own, forked of a fork server, which has loaded
the engine, or forked of the template: that is the holder, which has built the model.

What the daemon keeps for clients are requests under way and answers that they have not read; the
bound is max_memory_bytes of the configuration.

Where the daemon's control group (cgroup) is limited or under pressure, the last line shows what it
takes, cached files included, of what it and those above it may take. Beyond "high" the kernel slows
the processes down, beyond the limit it kills one. Pressure is the share of the last 10 s in which
some process waited for memory. MiB is 2^20 bytes, as in MemoryMax= of systemd.

--json prints one object: the daemon's answer, and pss_total_bytes, the memory of the whole service.

Exit status: 0 every model serves, 75 one does not serve yet, 1 one has failed (its cause is shown)."""

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
_LEFT = 3

_ORIGINS = {"forked": "forked of the fork server", "template": "forked of the template"}
_MOST_NAMES = 8


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="only this model (default: all)")


def _run(options: argparse.Namespace, connect: Connect) -> int:
    with connect() as client:
        try:
            response = client.status()
        except (Unavailable, DeadlineExceeded) as error:
            raise NotReached(error) from None
    total = pss_total(response)
    if options.model is not None:
        response = only(response, options.model)
    print(json.dumps(as_json(response, total)) if options.json else render(response, total))
    return exit_status(response)


VERB = Verb("show the models, their processes and their memory", _DESCRIPTION, _add_arguments, _run)


def only(response: StatusResponse, name: str) -> StatusResponse:
    """Return `response` without the other models.

    Raises:
        NotFound: there is no such model.
    """
    models = tuple(model for model in response.models if model.name == name)
    if not models:
        there = ", ".join(model.name for model in response.models) or "none"
        raise NotFound(f"no model {name!r}; there are: {there}")
    return dataclasses.replace(response, models=models)


def exit_status(response: StatusResponse) -> int:
    """Return what the models' states mean for a script."""
    states = {model.state for model in response.models}
    if "failed" in states:
        return exits.ERROR
    return exits.OK if states <= {"serving"} else exits.NOT_YET


def pss_total(response: StatusResponse) -> int:
    """Return the memory of the whole service: the daemon and all its processes."""
    servers = sum(each.pss_bytes or 0 for each in response.fork_servers)
    return (
        response.pss_bytes
        + servers
        + sum(
            process.pss_bytes or 0
            for model in response.models
            for generation in model.generations
            for process in generation.processes
        )
    )


def as_json(response: StatusResponse, total: int) -> Dict[str, Any]:
    """Return `response` as a dictionary, with the memory of the whole service."""
    return {**dataclasses.asdict(response), "pss_total_bytes": total}


def render(response: StatusResponse, total: int) -> str:
    """Return `response` as text for an operator.

    Args:
        response: what to show.
        total: the memory of the whole service, which may hold more models than `response` shows.
    """
    up = duration(response.uptime_s)
    lines = [f"weightd {clean(response.version)}: {clean(response.state)}, pid {response.pid}, up {up}"]
    if response.note:
        lines += paragraph("note", response.note, "  ")
    lines.append("")
    for model in response.models:
        lines += [*_model(model), ""]
    lines += [line for device in response.devices for line in _device(device)]
    lines += map(_gate, response.gates)
    lines += map(_fork_server, response.fork_servers)
    if response.dropped:
        lines.append(f"{response.dropped:,} answers dropped: their clients were gone, or did not read")
    lines.append(f"memory of the service: {size(total)} PSS, of which the daemon {size(response.pss_bytes)}")
    if response.held_bytes:
        lines.append(f"kept for clients: {binary(response.held_bytes)} of {binary(response.max_memory_bytes)}")
    if response.memory is not None:
        lines += _limit(response.memory)
    return "\n".join(lines)


def _model(model: ModelStatus) -> Iterator[str]:
    weights = f" with {clean(model.weights)}" if model.weights else ""
    yield f"{clean(model.name)}: {clean(model.state).upper()}, {clean(model.engine)}, {clean(model.path)}{weights}"
    counts = f"served {model.served:,}, failed {model.failed:,}, queued {model.queued:,}"
    if model.p50_us is not None:
        counts += f", p50 {milliseconds(model.p50_us)} ms, p99 {milliseconds(model.p99_us)} ms"
    yield f"  {counts}"
    yield from _executions(model)
    if model.deaths or model.quarantined:
        yield f"  {count(model.deaths, 'unexpected death')}, {model.quarantined:,} requests in quarantine"
    if model.note:
        yield from paragraph("note", model.note, "  ")
    for generation in model.generations:
        yield from _generation(generation, f"{model.name}.{generation.number}.")


def _executions(model: ModelStatus) -> Iterator[str]:
    """What was run, where that is not simply each request."""
    ran = model.executions
    if ran is None or not (ran.rows or ran.again):
        return
    parts = [count(ran.count, "execution")]
    if ran.cut:
        parts.append(f"{count(ran.cut, 'request')} cut")
    if ran.padded:
        parts.append(f"{count(ran.padded, 'row')} padded")
    if ran.again:
        parts.append(f"{ran.again:,} run again")
    yield f"  {', '.join(parts)}"
    if ran.rows:
        yield f"  executions by rows: {', '.join(f'{_up_to(each.most)}: {each.count:,}' for each in ran.rows)}"


def _up_to(most: int) -> str:
    return str(most) if most <= 2 else f"{most // 2 + 1} to {most}"


def _generation(generation: GenerationStatus, prefix: str) -> Iterator[str]:
    state = generation.progress or generation.state
    sha256 = f", sha256 {clean(generation.sha256)[:12]}" if generation.sha256 else ""
    yield f"  generation {generation.number} on {clean(generation.device)}: {clean(state)}{sha256}"
    if generation.cause:
        yield from paragraph("cause", generation.cause, "    ")
    if generation.canary:
        yield from paragraph("canary", generation.canary, "    ")
    if generation.rows:
        yield from paragraph("rows", generation.rows, "    ")
    if generation.processes:
        yield from table([_HEADING, *(_row(process, prefix) for process in generation.processes)], _LEFT, "    ")
    for process in generation.processes:
        if process.note:
            yield from paragraph(_short(process.name, prefix), process.note, "    ")
    yield from _places(generation, prefix)
    yield from _concurrent(generation, prefix)
    yield from _origins(generation, prefix)
    if generation.note:
        yield from paragraph("note", generation.note, "    ")
    yield from _savings(generation)


def _places(generation: GenerationStatus, prefix: str) -> Iterator[str]:
    """Who runs on which device, where these are several: a paragraph for each."""
    places: Dict[str, List[str]] = {}
    for process in generation.processes:
        if process.device not in ("", generation.device):
            places.setdefault(process.device, []).append(_short(process.name, prefix))
    for device, names in places.items():
        yield from paragraph(f"on {clean(device)}", ", ".join(names), "    ")


def _concurrent(generation: GenerationStatus, prefix: str) -> Iterator[str]:
    """Who runs more than one predict at once: a paragraph for each number."""
    numbers: Dict[int, List[str]] = {}
    for process in generation.processes:
        if process.concurrency > 1 and process.role != "holder":
            numbers.setdefault(process.concurrency, []).append(_short(process.name, prefix))
    for number, names in numbers.items():
        yield from paragraph(f"{number} predicts at once", ", ".join(names), "    ")


def _origins(generation: GenerationStatus, prefix: str) -> Iterator[str]:
    """How processes came to be, and why not otherwise: a paragraph for each way."""
    ways: Dict[Tuple[Optional[str], str], List[str]] = {}
    for process in generation.processes:
        ways.setdefault((process.origin, process.origin_note), []).append(_short(process.name, prefix))
    for (origin, note), names in ways.items():
        if origin is not None:
            who = ", ".join(names) if len(names) <= _MOST_NAMES else f"{len(names):,} processes"
            yield from paragraph(_ORIGINS.get(origin, clean(origin)), f"{who}{': ' if note else ''}{note}", "    ")


def _device(device: DeviceStatus) -> Iterator[str]:
    has = "of an unknown capacity" if device.capacity_bytes is None else f"of {size(device.capacity_bytes)}"
    used = device.weights_bytes + device.process_bytes
    yield f"{clean(device.name)}: {size(used)} {has}, {device.processes} of {device.max_processes} processes"
    yield (
        f"  weights {size(device.weights_bytes)} once, processes {size(device.process_bytes)} beside them, "
        f"sharing saves {size(device.saved_bytes)}"
    )
    if device.free_bytes is not None:
        yield f"  {size(device.free_bytes)} were free when the last process had loaded"
    yield ""


def _gate(gate: GateStatus) -> str:
    process = f"gate {gate.pid}" if gate.pid else "its gate is starting"
    restarts = f", restarted {gate.restarts:,} times" if gate.restarts else ""
    clients = count(gate.peers, "client")
    return f"listener {clean(gate.name)}: {clean(gate.address)}, {process}, {clients}{restarts}"


def _fork_server(server: ForkServerStatus) -> str:
    where = f"fork server of {clean(server.engine)} under {clean(server.python)}"
    if not server.pid:
        return f"{where}: none, {clean(server.note)}"
    return f"{where}: {server.pid}, {count(server.forked, 'process')} forked, {size(server.pss_bytes or 0)}"


def _limit(memory: MemoryLimit) -> Iterator[str]:
    """The line about the control group; none where nothing limits it and nothing has happened."""
    limit, high, kills, pressure = memory.limit_bytes, memory.high_bytes, memory.oom_kills, memory.pressure_percent
    if limit is None and high is None and not kills and not pressure:
        return
    text = binary(memory.usage_bytes)
    if limit is not None:
        text += f" of {binary(limit)}"
    if high is not None and (limit is None or high < limit):
        text += f" (high {binary(high)})"
    if pressure is not None:
        text += f", pressure {pressure:g} %"
    if kills:
        text += f", {kills:,} {'process' if kills == 1 else 'processes'} killed for memory"
    yield f"memory of its control group: {text}"


def _row(process: ProcessStatus, prefix: str) -> List[str]:
    works = process.role != "holder"
    return [
        _short(process.name, prefix),
        process.role,
        clean(process.state),
        str(process.pid),
        f"{process.served:,}" if works else "-",
        str(process.in_flight) if works else "-",
        milliseconds(process.p50_us),
        milliseconds(process.p99_us),
        megabytes(process.pss_bytes),
        megabytes(process.own_bytes),
        megabytes(process.shared_bytes) if works else "-",
    ]


def _short(name: str, prefix: str) -> str:
    """A process's name without what stands above it: tiny.1.w2 is w2."""
    return clean(name[len(prefix) :] if name.startswith(prefix) else name)


def _savings(generation: GenerationStatus) -> Iterator[str]:
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
