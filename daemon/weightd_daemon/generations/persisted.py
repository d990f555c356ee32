"""Records of serving generations in the state file, from which the next daemon takes the generations over."""

from __future__ import annotations

from dataclasses import dataclass, field

from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.attach_control import PERSISTED_STATES
from weightd_daemon.generations.base import GenerationBase, GenerationSetup
from weightd_daemon.generations.rank_group import RankGroup
from weightd_daemon.generations.shared_weights import Generation
from weightd_daemon.generations.states import RESUMABLE, ChildEvent, ChildState
from weightd_protocol import limits
from weightd_protocol.messages.worker import Built, Hello
from weightd_protocol.schema import boolean, integer, list_of, one_of, record, text

# Seconds that a child has to reconnect to the next daemon, in addition to the time of one predict. A child tries many
# times a second, but not while it runs a predict.
RECONNECT_TIMEOUT_S = 5.0

_PERSISTED_STATES = (ChildState.HOLDING, ChildState.READY, ChildState.AWAITED)

_NAME = text(limits.MAX_PATH_BYTES)
_PATH = text(limits.MAX_PATH_BYTES, empty=True)
_WORDS = text(limits.MAX_TEXT_BYTES, empty=True)
_COUNT = integer(0, limits.MAX_COUNT)


@dataclass(frozen=True)
class ChildRecord:
    """The record of a holder, a broker, a READY worker or a READY rank.

    `shared_bytes` and `note` are from the last report of the process: how many bytes of its memory are shared, and why
    not more.
    """

    name: str = field(metadata=_NAME)
    role: str = field(metadata=one_of([role.value for role in Role]))
    hello: Hello = field(metadata=record(Hello))
    shared_bytes: int = field(metadata=_COUNT)
    note: str = field(metadata=_WORDS)
    device: str = field(metadata=_NAME)


@dataclass(frozen=True)
class SealRecord:
    """The size in bytes and the modification time in ns of a page store, after the holder has written it."""

    size: int = field(metadata=_COUNT)
    mtime_ns: int = field(metadata=_COUNT)


@dataclass(frozen=True)
class GenerationRecord:
    """The record of a generation. The fields correspond to the attributes of `Generation` or `RankGroup`.

    `source` is the number of the model source. `attach_closed_reason` says why no further worker may attach. `models`
    describes the models of a rank group, and is empty for a `Generation`. `port` is the port of the ranks'
    communication library on their cards, or 0.
    """

    number: int = field(metadata=_COUNT)
    source: int = field(metadata=_COUNT)
    device: str = field(metadata=_NAME)
    is_sharing: bool = field(metadata=boolean())
    sha256: str = field(metadata=_NAME)
    attach_state: str = field(metadata=one_of(PERSISTED_STATES))
    attach_closed_reason: str = field(metadata=_WORDS)
    process_bytes: int = field(metadata=_COUNT)
    started_workers: int = field(metadata=_COUNT)
    built: Built = field(metadata=record(Built))
    children: tuple[ChildRecord, ...] = field(metadata=list_of(record(ChildRecord), limits.MAX_PIDS + 1))
    store_fingerprint: SealRecord | None = field(default=None, metadata=record(SealRecord))
    port: int = field(default=0, metadata=_COUNT)
    models: tuple[Built, ...] = field(default=(), metadata=list_of(record(Built), limits.MAX_GROUP_MODELS))


def record_generation(generation: GenerationBase, seal: SealRecord | None, port: int = 0) -> GenerationRecord | None:
    """Return the record from which the next daemon can resume a generation; None if it cannot be resumed."""
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


def resume_generation(setup: GenerationSetup, record: GenerationRecord, now: float) -> GenerationBase:
    """Return the generation that the previous daemon has recorded. It serves once its processes have reconnected."""
    spec = setup.spec
    generation = (Generation if spec.rank_group is None else RankGroup)(setup)
    generation.sha256, generation.built = record.sha256, record.built
    if isinstance(generation, RankGroup):
        generation.models = record.models
    generation.device_usage.process_bytes = record.process_bytes
    generation.processes.started_workers = record.started_workers
    generation.attach_control.restore(record.attach_state, record.attach_closed_reason)
    for each in record.children:
        child = generation.processes.add(each.name, Role(each.role), each.device)
        child.hello, child.shared_bytes, child.note = each.hello, each.shared_bytes, each.note
        if child.role in (Role.WORKER, Role.RANK):
            # Before it reconnects, the process may have to finish a batch of the previous daemon.
            child.advance(ChildEvent.AWAIT, now + RECONNECT_TIMEOUT_S + spec.predict_timeout)
        else:
            child.advance(ChildEvent.HOLD)
        if child.role is Role.HOLDER and spec.is_sharing and (record.built.handle or record.built.is_template):
            generation.attach_control.require(child, can_outlive_holder=spec.can_outlive_holder)
    workers_by_device = generation.processes.workers_by_device()
    generation.worker_target = spec.clamp_workers(max(workers_by_device.values(), default=0) - spec.spares)
    generation.on_resumed()
    return generation
