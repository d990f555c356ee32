"""The service, its models, devices, ZeroMQ proxies, fork servers and tenants, for people and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterator

from weightctl.status import generation, tenants
from weightctl.text import binary, clean, count, duration, milliseconds, paragraph, size
from weightd_protocol.messages.status import (
    DeviceStatus,
    ForkServerStatus,
    MemoryLimit,
    ModelStatus,
    ProxyStatus,
    StatusResponse,
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
    # Whoever sees its own alone is told of no process.
    pid = f", pid {response.pid}" if response.pid else ""
    lines = [f"weightd {clean(response.version)}: {clean(response.state)}{pid}, up {up}"]
    if response.note:
        lines += paragraph("note", response.note, "  ")
    lines.append("")
    for model in response.models:
        lines += [*_model_lines(model), ""]
    lines += [line for device in response.devices for line in _device_lines(device)]
    lines += tenants.format_tenants(response.tenants, [model.name for model in response.models])
    lines += map(_proxy_line, response.zmq_proxies)
    lines += map(_fork_server_line, response.fork_servers)
    if response.dropped_responses:
        lines.append(f"{response.dropped_responses:,} answers dropped: their clients were gone, or did not read")
    if response.pid:
        lines.append(f"memory of the service: {size(total)} PSS, of which the daemon {size(response.pss_bytes)}")
    else:
        lines.append("only this tenant's own requests are shown: it may not see the status of others")
    if response.buffered_bytes:
        lines.append(f"kept for clients: {binary(response.buffered_bytes)} of {binary(response.max_memory_bytes)}")
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
        yield f"  {count(model.unexpected_exits, 'unexpected death')}, {model.quarantined:,} requests in quarantine"
    if model.retry_s is not None:
        yield f"  next attempt to load it in {model.retry_s:.0f} s"
    if model.note:
        yield from paragraph("note", model.note, "  ")
    if model.group:
        yield f"  of the group {clean(model.group)}: one process serves all its models, and they come and go together"
    for each in model.generations:
        yield from generation.format_generation(each, f"{model.name}.{each.number}.")


def _execution_lines(model: ModelStatus) -> Iterator[str]:
    """What was run, where that is not simply each request."""
    executions = model.executions
    if executions is None or not (executions.rows or executions.retried):
        return
    parts = [count(executions.count, "execution")]
    if executions.split:
        parts.append(f"{count(executions.split, 'request')} split")
    if executions.padded:
        parts.append(f"{count(executions.padded, 'row')} padded")
    if executions.retried:
        parts.append(f"{executions.retried:,} run again")
    yield f"  {', '.join(parts)}"
    if executions.rows:
        yield (
            "  executions by rows:"
            f" {', '.join(f'{_row_range(each.max_rows)}: {each.count:,}' for each in executions.rows)}"
        )


def _row_range(max_rows: int) -> str:
    return str(max_rows) if max_rows <= 2 else f"{max_rows // 2 + 1} to {max_rows}"


def _device_lines(device: DeviceStatus) -> Iterator[str]:
    capacity = "of an unknown capacity" if device.capacity_bytes is None else f"of {size(device.capacity_bytes)}"
    used = device.weights_bytes + device.process_bytes + device.buffer_bytes
    yield f"{clean(device.name)}: {size(used)} {capacity}, {device.processes} of {device.max_processes} processes"
    yield (
        f"  weights {size(device.weights_bytes)} once, processes {size(device.process_bytes)} beside them, "
        f"sharing saves {size(device.saved_bytes)}"
    )
    if device.buffer_bytes:
        yield f"  communication between ranks {size(device.buffer_bytes)}"
    if device.free_bytes is not None:
        yield f"  {size(device.free_bytes)} were free when the last process had loaded"
    yield ""


def _proxy_line(proxy: ProxyStatus) -> str:
    process = f"proxy {proxy.pid}" if proxy.pid else "its proxy is starting"
    restarts = f", restarted {proxy.restarts:,} times" if proxy.restarts else ""
    clients = count(proxy.peers, "client")
    return f"listener {clean(proxy.name)}: {clean(proxy.address)}, {process}, {clients}{restarts}"


def _fork_server_line(server: ForkServerStatus) -> str:
    where = f"fork server of {clean(server.engine)} under {clean(server.python)}"
    if not server.pid:
        return f"{where}: none, {clean(server.note)}"
    return f"{where}: {server.pid}, {count(server.forked, 'process')} forked, {size(server.pss_bytes or 0)}"


def _memory_limit_line(memory: MemoryLimit) -> Iterator[str]:
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
