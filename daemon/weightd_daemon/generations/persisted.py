"""What is written down of a generation that serves, for the daemon that will take it over."""

from __future__ import annotations

from dataclasses import dataclass, field

from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.attach_control import PERSISTED_STATES
from weightd_protocol import limits
from weightd_protocol.messages.worker import Built, Hello
from weightd_protocol.schema import boolean, integer, list_of, one_of, record, text

_NAME = text(limits.MAX_PATH_BYTES)
_PATH = text(limits.MAX_PATH_BYTES, empty=True)
_WORDS = text(limits.MAX_TEXT_BYTES, empty=True)
_COUNT = integer(0, limits.MAX_COUNT)


@dataclass(frozen=True)
class ChildRecord:
    """A holder that holds, a broker, or a worker or a rank that is READY, and on which device.

    `shared_bytes` and `note` are what it said of its weights.
    """

    name: str = field(metadata=_NAME)
    role: str = field(metadata=one_of([role.value for role in Role]))
    hello: Hello = field(metadata=record(Hello))
    shared_bytes: int = field(metadata=_COUNT)
    note: str = field(metadata=_WORDS)
    device: str = field(metadata=_NAME)


@dataclass(frozen=True)
class SealRecord:
    """What the page store was when the holder had exported it."""

    size: int = field(metadata=_COUNT)
    mtime_ns: int = field(metadata=_COUNT)


@dataclass(frozen=True)
class GenerationRecord:
    """A generation that serves. The fields are those of `Generation` or `RankGroup`; `source` is its source's number.

    `attach_state` is who may still attach, `attach_closed_reason` why nobody may. `models` are those of a unit, none of
    workers; `port` is that of its ranks' communication, 0 where none was told one.
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
