"""The records of models and devices in the hand-over file, from which the next daemon resumes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from weightd_common.safe_open import Grant
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.generations.persisted import GenerationRecord
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.processes.events import SliceSnapshot, Snapshot
from weightd_daemon.processes.snapshots import snapshot_directory_name
from weightd_protocol import limits
from weightd_protocol.schema import integer, list_of, number, record, text

_NAME = text(limits.MAX_PATH_BYTES)
_PATH = text(limits.MAX_PATH_BYTES, empty=True)
_COUNT = integer(0, limits.MAX_COUNT)


@dataclass(frozen=True)
class SliceRecord:
    """The persisted form of a `SliceSnapshot`, with the same fields."""

    path: str = field(metadata=_NAME)
    sha256: str = field(metadata=_NAME)
    nbytes: int = field(metadata=_COUNT)
    identity: str = field(metadata=_PATH)
    group_info: str = field(default="", metadata=_PATH)


@dataclass(frozen=True)
class GrantRecord:
    """The persisted form of a `Grant` (a client's file permissions), with the same fields."""

    uid: int | None = field(default=None, metadata=_COUNT)
    gids: tuple[int, ...] = field(default=(), metadata=list_of(_COUNT, 1024))
    directories: tuple[str, ...] = field(default=(), metadata=list_of(_NAME, 1024))


@dataclass(frozen=True)
class SourceRecord:
    """The persisted form of a `ModelSource` and its `Snapshot`; `selftest_inputs` is the snapshot's `sample`."""

    number: int = field(metadata=_COUNT)
    path: str = field(metadata=_NAME)
    weights: str = field(metadata=_PATH)
    snapshot_path: str = field(metadata=_NAME)
    snapshot_weights: str = field(metadata=_PATH)
    sha256: str = field(metadata=_NAME)
    nbytes: int = field(metadata=_COUNT)
    selftest_inputs: str = field(default="", metadata=_PATH)
    identity: str = field(default="", metadata=_PATH)
    slices: tuple[SliceRecord, ...] = field(default=(), metadata=list_of(record(SliceRecord), limits.MAX_DEVICES))
    rank_tables: tuple[str, ...] = field(default=(), metadata=list_of(_NAME, limits.MAX_DEVICES))
    grant: GrantRecord = field(default=GrantRecord(), metadata=record(GrantRecord))
    weights_grant: GrantRecord = field(default=GrantRecord(), metadata=record(GrantRecord))

    @classmethod
    def from_source(cls, source: ModelSource, snapshot: Snapshot) -> SourceRecord:
        """Return the record of a source and its snapshot."""
        there = snapshot
        slices = tuple(SliceRecord(*dataclasses.astuple(each)) for each in there.slices)
        fields = there.path, there.weights, there.sha256, there.nbytes, there.sample, there.identity
        grants = GrantRecord(*source.grant), GrantRecord(*source.weights_grant)
        return cls(source.number, source.path, source.weights, *fields, slices, there.rank_tables, *grants)

    @property
    def restored_source(self) -> ModelSource:
        """The `ModelSource` of this record."""
        grants = (Grant(each.uid, each.gids, each.directories) for each in (self.grant, self.weights_grant))
        return ModelSource(self.path, self.weights, self.number, *grants)

    @property
    def restored_snapshot(self) -> Snapshot:
        """The `Snapshot` of this record."""
        slices = tuple(SliceSnapshot(*dataclasses.astuple(each)) for each in self.slices)
        fields = (
            self.snapshot_path,
            self.snapshot_weights,
            self.sha256,
            self.nbytes,
            self.selftest_inputs,
            self.identity,
        )
        return Snapshot(*fields, slices, self.rank_tables)


@dataclass(frozen=True)
class ModelRecord:
    """The persisted form of a model: its configuration, sources and generations.

    `source` and `previous` are the numbers of the current and the previous source in `sources`; `previous` is 0 without
    a previous source. `last_ids` are the numbers that were last assigned to a generation and to a source. `owner` is
    the tenant to which the memory of the model is charged; "" for none.
    """

    name: str = field(metadata=text(limits.MAX_MODEL_NAME_BYTES))
    config: ModelConfig = field(metadata=record(ModelConfig))
    source: int = field(metadata=_COUNT)
    previous: int = field(metadata=_COUNT)
    last_ids: tuple[int, ...] = field(metadata=list_of(_COUNT, 2))
    sources: tuple[SourceRecord, ...] = field(metadata=list_of(record(SourceRecord), 2))
    generations: tuple[GenerationRecord, ...] = field(metadata=list_of(record(GenerationRecord), limits.MAX_DEVICES))
    owner: str = field(default="", metadata=text(limits.MAX_NAME_BYTES, empty=True))

    @property
    def children(self) -> list[str]:
        """The names of the model's child processes."""
        return [child.name for each in self.generations for child in each.children]

    @property
    def directories(self) -> list[str]:
        """The names of the directories of the model's generations and snapshots."""
        snapshots = [snapshot_directory_name(self.name, each.number) for each in self.sources]
        return [*(f"{self.name}.{each.number}" for each in self.generations), *snapshots]


@dataclass(frozen=True)
class ShareRecord:
    """The persisted share of one version in the requests that name no version."""

    version: int = field(metadata=_COUNT)
    share: float = field(metadata=number(1.0))


@dataclass(frozen=True)
class RolloutRecord:
    """The persisted shares that a rollout has set for a model with several versions."""

    model: str = field(metadata=text(limits.MAX_MODEL_NAME_BYTES))
    shares: tuple[ShareRecord, ...] = field(metadata=list_of(record(ShareRecord), limits.MAX_MODEL_VERSIONS))


@dataclass(frozen=True)
class DeviceRecord:
    """The persisted memory of a card.

    `capacity_bytes` is the free memory that the card reported before the first model was loaded, and `free_bytes` the
    free memory after the last load; None: unknown.
    """

    name: str = field(metadata=_NAME)
    capacity_bytes: int | None = field(default=None, metadata=_COUNT)
    free_bytes: int | None = field(default=None, metadata=_COUNT)
