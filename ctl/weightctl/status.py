"""The command `weightctl status`: daemon, models, generations, devices, tenants and ZeroMQ proxies, as text or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from weightctl import exit_codes
from weightctl.command import Command, Connect, filter_model, must_answer
from weightctl.text import (
    OWN_REQUESTS_ONLY,
    binary,
    clean,
    count,
    duration,
    load_lines,
    megabytes,
    milliseconds,
    paragraph,
    size,
    table,
    version_line,
)
from weightd_common.dashboard.memory import pss_total
from weightd_common.log_text import progress_text
from weightd_protocol.messages.accounts import AccountStatus, TenantStatus, total_account
from weightd_protocol.messages.status import (
    DeviceStatus,
    ForkServerStatus,
    GenerationStatus,
    MemoryLimit,
    ModelStatus,
    ProcessStatus,
    ProxyStatus,
    StatusResponse,
)

_DESCRIPTION = """\
Shows the models with their generations (one copy of the weights each) and
processes, and the memory of the service. See weightctl(1) for the columns.

--json prints one object: the daemon's response, and pss_total_bytes, the
memory of the service.

Exit status: 0 every model serves or is unloaded, 75 a model does not serve yet,
1 a model has failed (the cause is shown)."""

_MANUAL = """\
The columns of processes: NOW is the number of requests that a process is executing. Latencies are
measured by the daemon, from the arrival of a request to its response, over the most recent
responses. PSS is the proportional set size: the private memory of a process and its share of the
memory that it shares with others, so the sum of all PSS is the memory of the service. OWN is the
private memory, which would be freed if the process ended. SHARED is the part of a worker's weights
that is in memory shared with other processes. MB is 10^6 bytes.

A generation on several sets of cores, such as cpu:0 and cpu:1, is shown as one generation "on
cpu"; lines below its processes show the processes on each set.

A model that is split over ranks is one generation "on" all their devices; lines below its
processes show the device and the slice of each rank. A broker lets the ranks find each other.

Processes are spawned with a new interpreter, forked from a fork server, which has loaded the
engine, or forked from the template, which is the holder with the built model.

The memory kept for clients contains requests in progress and responses that clients have not read;
max_memory_bytes in the configuration limits it.

If the daemon's control group (cgroup) has a limit or is under pressure, the last line shows its
memory, including cached files, and the lowest limits of the group and its ancestors. Above "high",
the kernel slows the processes down; at the limit, it kills a process. Pressure is the share of the
last 10 s in which at least one process waited for memory. MiB is 2^20 bytes, as in MemoryMax= of
systemd.

If tenants are configured, a table shows the usage of each model by each tenant since the counters
began; they continue over restarts of the daemon. The columns: the number of requests, of those
SERVED and REFUSED, of those in progress (NOW) and of those among them that are QUEUED; ROWS; the
seconds for which workers were busy (SLOT); the average time in the queue (WAIT); the size of
tensors received (IN) and sent (OUT). "(other)" contains requests for models that no longer exist,
and requests that were refused before their model was known. Lines below the table show weights,
shares of the last minute, and refusals by reason: a limit of the tenant, such as max_rate, or an
error code. A tenant that may not see the "status" of others sees only its own requests."""

_PROCESS_HEADING = (
    *("PROCESS", "ROLE", "STATE", "PID", "SERVED", "NOW"),
    *("P50 ms", "P99 ms", "PSS MB", "OWN MB", "SHARED MB"),
)
_PROCESS_LEFT_COLUMNS = 3

_TENANT_HEADING = (
    *("TENANT", "MODEL", "REQUESTS", "SERVED", "REFUSED", "NOW", "QUEUED"),
    *("ROWS", "SLOT s", "WAIT ms", "IN MB", "OUT MB"),
)
_TENANT_LEFT_COLUMNS = 2

# Maximum width of a column in characters. Names of models have up to 64 characters.
_MAX_CHARACTERS = 24

# Roles of processes that do not serve requests.
_NON_SERVING_ROLES = ("holder", "broker")

_ORIGIN_TEXTS = {"forked": "forked from the fork server", "template": "forked from the template"}

_MAX_NAMES = 8


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="name of the model (default: all models)")


def _show_status(options: argparse.Namespace, connect: Connect) -> int:
    with connect() as client, must_answer():
        response = client.status()
    total = pss_total(response)
    if options.model is not None:
        response = filter_model(response, options.model)
    print(json.dumps(as_json(response, total)) if options.json else render(response, total))
    return exit_status(response)


def exit_status(response: StatusResponse) -> int:
    """Return the exit status of weightctl for the states of these models."""
    states = {model.state for model in response.models}
    if "failed" in states:
        return exit_codes.ERROR
    return exit_codes.OK if states <= {"serving", "unloaded"} else exit_codes.NOT_YET


def as_json(response: StatusResponse, total: int) -> Dict[str, Any]:
    """Return `response` as a dictionary for JSON, with the memory use of the whole service added."""
    return {**dataclasses.asdict(response), "pss_total_bytes": total}


def render(response: StatusResponse, total: int) -> str:
    """Return `response` as text for an operator.

    Args:
        response: the status of the daemon, possibly with only some of its models.
        total: the memory use of the whole service, including models that are not in `response`.
    """
    up = duration(response.uptime_s)
    # A client that may see only its own requests gets the pid 0 from the daemon. In that case, print no pid.
    pid = f", pid {response.pid}" if response.pid else ""
    lines = [f"weightd {clean(response.version)}: {clean(response.state)}{pid}, up {up}"]
    if response.note:
        lines += paragraph("note", response.note, "  ")
    lines.append("")
    for model in response.models:
        lines += [*_model_lines(model), ""]
    lines += map(version_line, response.version_sets)
    lines += [line for device in response.devices for line in _device_lines(device)]
    lines += format_tenants(response.tenants, [model.name for model in response.models])
    lines += map(_proxy_line, response.zmq_proxies)
    lines += map(_fork_server_line, response.fork_servers)
    if response.dropped_responses:
        lines.append(
            f"{count(response.dropped_responses, 'response')} dropped, because clients disconnected or did not read"
        )
    if response.pid:
        lines.append(f"memory of the service: {size(total)} PSS, including the daemon's {size(response.pss_bytes)}")
    else:
        lines.append(OWN_REQUESTS_ONLY)
    if response.buffered_bytes:
        lines.append(f"kept for clients: {binary(response.buffered_bytes)} of {binary(response.max_memory_bytes)}")
    if response.max_model_bytes:
        lines.append(f"reserved for models: {binary(response.model_bytes)} of {binary(response.max_model_bytes)}")
    if response.memory is not None:
        lines += _memory_limit_line(response.memory)
    return "\n".join(lines)


def _model_lines(model: ModelStatus) -> Iterator[str]:
    weights = f" with {clean(model.weights)}" if model.weights else ""
    path = f", {clean(model.path)}" if model.path else ""
    yield f"{clean(model.name)}: {clean(model.state).upper()}, {clean(model.engine)}{path}{weights}"
    counts = f"served {model.served:,}, failed {model.failed:,}, queued {model.queued:,}"
    if model.p50_us is not None:
        counts += f", p50 {milliseconds(model.p50_us)} ms, p99 {milliseconds(model.p99_us)} ms"
    yield f"  {counts}"
    yield from _execution_lines(model)
    if model.unexpected_exits or model.quarantined:
        yield f"  {count(model.unexpected_exits, 'unexpected exit')}, {model.quarantined:,} requests in quarantine"
    yield from load_lines(model)
    if model.retry_s is not None:
        failures = count(model.attempts, "failed attempt")
        yield f"  next attempt to load the model in {model.retry_s:.0f} s, after {failures}"
    if model.note:
        yield from paragraph("note", model.note, "  ")
    if model.group:
        yield f"  in group {clean(model.group)}: each process serves all models of the group"
    for each in model.generations:
        yield from format_generation(each, f"{model.name}.{each.number}.")


def _execution_lines(model: ModelStatus) -> Iterator[str]:
    """Yield lines about executions, if rows are batched or split, or if some requests ran more than once."""
    executions = model.executions
    if executions is None or not (executions.rows or executions.retried):
        return
    parts = [count(executions.count, "execution")]
    if executions.split:
        parts.append(f"{count(executions.split, 'request')} split")
    if executions.padded:
        parts.append(f"{count(executions.padded, 'row')} padded")
    if executions.retried:
        parts.append(f"{executions.retried:,} retried")
    yield f"  {', '.join(parts)}"
    if executions.rows:
        yield (
            "  executions by rows:"
            f" {', '.join(f'{_row_range(each.max_rows)}: {each.count:,}' for each in executions.rows)}"
        )


def _row_range(max_rows: int) -> str:
    return str(max_rows) if max_rows <= 2 else f"{max_rows // 2 + 1} to {max_rows}"


def format_generation(generation: GenerationStatus, prefix: str) -> Iterator[str]:
    """Yield the lines for a generation. `prefix` is the part that the names of all its processes have in common."""
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
            [_PROCESS_HEADING, *(_row(process, prefix) for process in generation.processes)],
            _PROCESS_LEFT_COLUMNS,
            "    ",
        )
    for process in generation.processes:
        if process.note:
            yield from paragraph(_short(process.name, prefix), process.note, "    ")
    yield from _placement_lines(generation, prefix)
    yield from _slice_lines(generation, prefix)
    yield from _concurrency_lines(generation, prefix)
    yield from _origin_lines(generation, prefix)
    if generation.note:
        yield from paragraph("note", generation.note, "    ")
    yield from _savings_lines(generation)


def _placement_lines(generation: GenerationStatus, prefix: str) -> Iterator[str]:
    """Yield the names of the processes on each device, if the generation has several devices."""
    names_by_device: Dict[str, List[str]] = {}
    for process in generation.processes:
        if process.device not in ("", generation.device):
            names_by_device.setdefault(process.device, []).append(_short(process.name, prefix))
    for device, names in names_by_device.items():
        yield from paragraph(f"on {clean(device)}", ", ".join(names), "    ")


def _slice_lines(generation: GenerationStatus, prefix: str) -> Iterator[str]:
    """Yield the digest of the slice that each rank has loaded, if the generation has ranks."""
    slices = [f"{_short(each.name, prefix)} {clean(each.sha256)[:12]}" for each in generation.processes if each.sha256]
    if slices:
        yield from paragraph("sha256 of slices", ", ".join(slices), "    ")


def _concurrency_lines(generation: GenerationStatus, prefix: str) -> Iterator[str]:
    """Yield the names of processes that run several predicts at once, grouped by the number of predicts."""
    names_by_concurrency: Dict[int, List[str]] = {}
    for process in generation.processes:
        if process.concurrency > 1 and process.role not in _NON_SERVING_ROLES:
            names_by_concurrency.setdefault(process.concurrency, []).append(_short(process.name, prefix))
    for number, names in names_by_concurrency.items():
        yield from paragraph(f"{number} predicts at once", ", ".join(names), "    ")


def _origin_lines(generation: GenerationStatus, prefix: str) -> Iterator[str]:
    """Yield lines that group processes by the way they were created and by the reason why they were not forked."""
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
    """Return a process's name without `prefix`, such as w2 for tiny.1.w2."""
    return clean(name[len(prefix) :] if name.startswith(prefix) else name)


def _savings_lines(generation: GenerationStatus) -> Iterator[str]:
    if any(process.role == "rank" for process in generation.processes):
        return  # sharing saves nothing, because each rank has its own slice of the weights
    sharing = sum(1 for process in generation.processes if process.role != "holder" and process.shared_bytes)
    copy, saved = generation.copy_bytes, generation.saved_bytes
    workers = count(sharing, "worker")
    if not sharing:
        if any(process.state == "ready" for process in generation.processes):
            yield "    sharing saves nothing: no worker shares its weights"
    elif copy is None or saved is None:
        yield f"    sharing saves an unknown amount: {workers} on one copy of unknown size in memory"
    elif saved:
        separate = size(saved + copy)
        yield (
            f"    sharing saves {size(saved)}: {workers} on one copy of {size(copy)} instead of {separate} in separate"
            " copies"
        )
    elif copy:
        yield f"    sharing saves nothing yet: {workers} on one copy of {size(copy)}"
    else:
        yield f"    sharing saves nothing yet: {workers} on one copy, which is on disk until it is used"


def format_tenants(tenants: Sequence[TenantStatus], models: Sequence[str]) -> Iterator[str]:
    """Yield table and notes of the tenants. Count only requests for `models`, and requests that have no model."""
    found = [(tenant, _shown_accounts(tenant, models)) for tenant in tenants]
    rows = [row for tenant, accounts in found for row in _rows(tenant, accounts)]
    if rows:
        yield from table([_TENANT_HEADING, *rows], _TENANT_LEFT_COLUMNS, "")
    for tenant, accounts in found:
        if accounts:
            yield from paragraph(clean(tenant.name), "; ".join(_notes(tenant, accounts)), "")
    idle = [clean(tenant.name) for tenant, accounts in found if not accounts]
    if idle:
        yield from paragraph("no requests of", ", ".join(idle), "")
    if tenants:
        yield ""


def _shown_accounts(tenant: TenantStatus, models: Sequence[str]) -> List[AccountStatus]:
    return [each for each in tenant.accounts if each.model in models or not each.model]


def _rows(tenant: TenantStatus, accounts: Sequence[AccountStatus]) -> Iterator[List[str]]:
    name = _shorten(tenant.name)
    for account in accounts:
        yield [name, _shorten(account.model) or "(other)", *_account_cells(account)]
        # Only the first row of a tenant shows its name.
        name = ""


def _account_cells(account: AccountStatus) -> List[str]:
    return [
        f"{account.requests:,}",
        f"{account.served:,}",
        f"{account.refused:,}",
        f"{account.in_flight:,}",
        f"{account.queued:,}",
        f"{account.rows:,}",
        f"{account.slot_seconds:,.1f}",
        "-" if account.mean_queue_s is None else f"{1000 * account.mean_queue_s:,.1f}",
        megabytes(account.bytes_in),
        megabytes(account.bytes_out),
    ]


def _notes(tenant: TenantStatus, accounts: Sequence[AccountStatus]) -> Iterator[str]:
    yield f"weight {tenant.weight:g}"
    if tenant.share is not None:
        yield f"{tenant.share:.0%} of the seconds of the last minute"
    total = total_account(accounts)
    if total.failed:
        yield "refused: " + ", ".join(f"{reason} {number:,}" for reason, number in total.failed.items())
    if total.unexpected_exits:
        yield f"its requests crashed {count(total.unexpected_exits, 'worker')}"
    if tenant.merged_accounts:
        yield f"(other) includes {count(tenant.merged_accounts, 'model')} that did not fit into the response"


def _shorten(name: str) -> str:
    name = clean(name)
    return name if len(name) <= _MAX_CHARACTERS else f"{name[: _MAX_CHARACTERS - 3]}..."


def _device_lines(device: DeviceStatus) -> Iterator[str]:
    capacity = "of unknown capacity" if device.capacity_bytes is None else f"of {size(device.capacity_bytes)}"
    used = device.weights_bytes + device.process_bytes + device.buffer_bytes
    yield f"{clean(device.name)}: {size(used)} {capacity}, {device.processes} of {device.max_processes} processes"
    yield (
        f"  weights {size(device.weights_bytes)} in one copy, processes {size(device.process_bytes)} in addition, "
        f"sharing saves {size(device.saved_bytes)}"
    )
    if device.buffer_bytes:
        yield f"  buffers for communication between ranks {size(device.buffer_bytes)}"
    if device.free_bytes is not None:
        yield f"  {size(device.free_bytes)} free after the last process had loaded"
    yield ""


def _proxy_line(proxy: ProxyStatus) -> str:
    process = f"proxy {proxy.pid}" if proxy.pid else "proxy starting"
    restarts = f", {count(proxy.restarts, 'restart')}" if proxy.restarts else ""
    clients = count(proxy.peers, "client")
    return f"listener {clean(proxy.name)}: {clean(proxy.address)}, {process}, {clients}{restarts}"


def _fork_server_line(server: ForkServerStatus) -> str:
    where = f"fork server of {clean(server.engine)} under {clean(server.python)}"
    if not server.pid:
        return f"{where}: none, {clean(server.note)}"
    return f"{where}: {server.pid}, {count(server.forked, 'process')} forked, {size(server.pss_bytes or 0)}"


def _memory_limit_line(memory: MemoryLimit) -> Iterator[str]:
    """Yield the line about the control group, unless it has no limit, no memory pressure and no OOM kills."""
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
        text += f", {count(kills, 'process')} killed for lack of memory"
    yield f"memory of the control group: {text}"


COMMAND = Command(
    "show the models, their processes and their memory", _DESCRIPTION, _add_arguments, _show_status, _MANUAL
)
