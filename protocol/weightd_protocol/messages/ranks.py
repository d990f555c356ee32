"""What is said only to and by the processes of a unit, which live and die together.

A unit is a model that is cut over several processes, its ranks, of which each has one slice; or one process that serves
several models, its members.
"""

from __future__ import annotations

from dataclasses import field
from typing import Optional, Tuple

from weightd_protocol import limits
from weightd_protocol.frozen import dataclass
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.worker_common import (
    BATCH_SIZES,
    DIGEST,
    ROW_COUNT,
    SELFTEST_CASE,
    SELFTEST_CASES,
    DeviceMemory,
    RowSupport,
    SelfTestCases,
)
from weightd_protocol.schema import integer, list_of, record

_SIGNATURES = list_of(record(TensorSignature), limits.MAX_TENSORS)


@dataclass(frozen=True)
class RankSlice:
    """Which rank a process is, and what the file of its slice says of the model's tensors."""

    rank: int = field(metadata=integer(0, limits.MAX_DEVICES - 1))
    """Number of the rank, from 0."""
    inputs: Tuple[TensorSignature, ...] = field(metadata=_SIGNATURES)
    """Inputs of the model according to the file; equal for all ranks."""
    outputs: Tuple[TensorSignature, ...] = field(metadata=_SIGNATURES)
    """Outputs of the model according to the file; equal for all ranks."""


@dataclass(frozen=True)
class GroupModelSignature:
    """One of the models of a process that has several: what it takes and gives."""

    inputs: Tuple[TensorSignature, ...] = field(metadata=_SIGNATURES)
    """Inputs of the model."""
    outputs: Tuple[TensorSignature, ...] = field(metadata=_SIGNATURES)
    """Outputs of the model."""


@dataclass(frozen=True)
class SelfTestResult:
    """What the self-test of one model of a process has shown: the digest of its answer, "" where it has none."""

    selftest_digest: str = field(metadata=DIGEST)
    """Sha256 of the answer; empty if the model has no self-test."""
    selftest_cases: SelfTestCases = field(metadata=list_of(SELFTEST_CASE, 1))
    """Input shapes on which the self-test ran."""


@dataclass(frozen=True)
class JoinGroup:
    """daemon → each process of a unit: all are there; join the group, and load.

    A broker, by which ranks find each other, answers nothing to it.
    """


@dataclass(frozen=True)
class JoinedGroup:
    """rank → daemon: I am in the group, and have loaded my slice, which takes and gives this.

    `members` are those of a process that has several models; then `inputs` and `outputs` are empty.
    """

    inputs: Tuple[TensorSignature, ...] = field(metadata=_SIGNATURES)
    outputs: Tuple[TensorSignature, ...] = field(metadata=_SIGNATURES)
    device: Optional[DeviceMemory] = field(default=None, metadata=record(DeviceMemory))
    """The card's memory after that; None on the CPU."""
    members: Tuple[GroupModelSignature, ...] = field(
        default=(), metadata=list_of(record(GroupModelSignature), limits.MAX_GROUP_MODELS)
    )


@dataclass(frozen=True)
class RunSelfTest:
    """daemon → rank: all have joined, and all are told this at once: run the self-test.

    `max_rows`, `allowed_batch_sizes` as in `Build`.
    """

    max_rows: int = field(default=1, metadata=ROW_COUNT)
    allowed_batch_sizes: Tuple[int, ...] = field(default=(), metadata=BATCH_SIZES)


@dataclass(frozen=True)
class SelfTestDone:
    """rank → daemon: I have run the self-test, and what I had to compare was right.

    `selftest_digest` is the digest of what was compared, "" where this rank has nothing to compare, and
    `selftest_cases` are its inputs. Of a process that has several models `members` has both of each, in their order;
    then these are empty.
    """

    selftest_digest: str = field(metadata=DIGEST)
    selftest_cases: SelfTestCases = field(metadata=SELFTEST_CASES)
    row_support: Optional[RowSupport] = field(default=None, metadata=record(RowSupport))
    """None where it was not to be found out."""
    device: Optional[DeviceMemory] = field(default=None, metadata=record(DeviceMemory))
    """The card's memory after that; None on the CPU."""
    members: Tuple[SelfTestResult, ...] = field(
        default=(), metadata=list_of(record(SelfTestResult), limits.MAX_GROUP_MODELS)
    )


@dataclass(frozen=True)
class PredictDone:
    """rank → daemon: the `Predict` is run, and what came of it another rank tells."""

    request: int = field(metadata=integer(0, limits.MAX_COUNT))
    """As in `Predict`."""
