"""One daemon after another: what is written down of a generation, and how the next daemon goes on with it."""

from __future__ import annotations

from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.persisted import ChildRecord, GenerationRecord, SealRecord
from weightd_daemon.generations.rank_group import RankGroup
from weightd_daemon.generations.shared_weights import Generation
from weightd_daemon.generations.spec import GenerationSpec, ModelSource
from weightd_daemon.generations.states import RESUMABLE, ChildEvent, ChildState

# A child looks for the daemon many times a second. One that computes is not there before it has finished that.
RECONNECT_TIMEOUT_S = 5.0

_PERSISTED_STATES = (ChildState.HOLDING, ChildState.READY, ChildState.AWAITED)


def record_generation(generation: GenerationBase, seal: SealRecord | None, port: int = 0) -> GenerationRecord | None:
    """Return what the next daemon has to know to `resume_generation` a generation; None if it cannot."""
    if generation.built is None or generation.state not in RESUMABLE:
        return None
    children = [
        ChildRecord(child.name, child.role.value, child.hello, child.shared_bytes, child.note, child.device)
        for child in generation.children.values()
        if child.hello is not None and child.state in _PERSISTED_STATES
    ]
    return GenerationRecord(
        number=generation.number,
        source=generation.source.number,
        device=generation.device,
        is_sharing=generation.spec.is_sharing,
        sha256=generation.sha256,
        attach_state=generation.attach_control.persisted_state,
        attach_closed_reason=generation.attach_control.closed_reason,
        process_bytes=generation.device_usage.process_bytes,
        started_workers=generation.processes.started_workers,
        built=generation.built,
        children=tuple(children),
        store_fingerprint=seal,
        port=port,
        models=generation.models if isinstance(generation, RankGroup) else (),
    )


def resume_generation(
    label: str, spec: GenerationSpec, source: ModelSource, record: GenerationRecord, now: float
) -> Generation:
    """Return a generation that a daemon before this one has loaded; its workers serve once they have reconnected."""
    generation = Generation(label, spec, record.device, source, record.number)
    generation.sha256, generation.built = record.sha256, record.built
    generation.device_usage.process_bytes = record.process_bytes
    generation.processes.started_workers = record.started_workers
    generation.attach_control.restore(record.attach_state, record.attach_closed_reason)
    for each in record.children:
        child = generation.processes.add(each.name, Role(each.role), each.device)
        child.hello, child.shared_bytes, child.note = each.hello, each.shared_bytes, each.note
        if child.role is Role.WORKER:
            # It may have to finish what it was given by the daemon before.
            child.advance(ChildEvent.AWAIT, now + RECONNECT_TIMEOUT_S + spec.predict_timeout)
        else:
            child.advance(ChildEvent.HOLD)
            generation.require_holder(child)
    generation.on_resumed()
    return generation


def resume_rank_group(
    label: str, spec: GenerationSpec, source: ModelSource, record: GenerationRecord, now: float
) -> RankGroup:
    """Return a rank group that a previous daemon has loaded; it serves once all ranks have reconnected, at one step."""
    generation = RankGroup(label, spec, record.device, source, record.number)
    generation.sha256, generation.models, generation.built = record.sha256, record.models, record.built
    generation.device_usage.process_bytes = record.process_bytes
    for each in record.children:
        child = generation.processes.add(each.name, Role(each.role), each.device)
        child.hello = each.hello
        if child.role is Role.RANK:
            child.advance(ChildEvent.AWAIT, now + RECONNECT_TIMEOUT_S + spec.predict_timeout)
        else:
            child.advance(ChildEvent.HOLD)
    generation.on_resumed()
    return generation
