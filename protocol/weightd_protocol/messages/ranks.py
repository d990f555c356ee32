"""Messages to and from processes of a rank group, and of a process that serves a model group.

The ranks of a model that is cut into slices run as a rank group: its processes start and stop together. A process that
serves all models of a model group is treated as a rank group with one process; its models are its members.
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
    """The number of a rank, and the model's signature according to the file of its slice."""

    rank: int = field(metadata=integer(0, limits.MAX_DEVICES - 1))
    """Number of the rank, from 0."""
    inputs: Tuple[TensorSignature, ...] = field(metadata=_SIGNATURES)
    """Inputs of the model according to the file; equal for all ranks."""
    outputs: Tuple[TensorSignature, ...] = field(metadata=_SIGNATURES)
    """Outputs of the model according to the file; equal for all ranks."""


@dataclass(frozen=True)
class GroupModelSignature:
    """Signature of one model of a model group."""

    inputs: Tuple[TensorSignature, ...] = field(metadata=_SIGNATURES)
    """Inputs of the model."""
    outputs: Tuple[TensorSignature, ...] = field(metadata=_SIGNATURES)
    """Outputs of the model."""


@dataclass(frozen=True)
class SelfTestResult:
    """Self-test result of one model of a process: inputs and digest. The digest is "" without a self-test."""

    selftest_digest: str = field(metadata=DIGEST)
    """Sha256 of the answer; empty if the model has no self-test."""
    selftest_cases: SelfTestCases = field(metadata=list_of(SELFTEST_CASE, 1))
    """Input shapes on which the self-test ran."""


@dataclass(frozen=True)
class JoinGroup:
    """daemon → each process of a rank group: all processes are running; join the group and load the slice.

    The broker, through which the ranks find each other, does not reply.
    """


@dataclass(frozen=True)
class JoinedGroup:
    """rank → daemon: joined the group and loaded the slice, which has this signature.

    A process with a model group sends the signatures in `members`; `inputs` and `outputs` are then empty.
    """

    inputs: Tuple[TensorSignature, ...] = field(metadata=_SIGNATURES)
    outputs: Tuple[TensorSignature, ...] = field(metadata=_SIGNATURES)
    device: Optional[DeviceMemory] = field(default=None, metadata=record(DeviceMemory))
    """The card's memory afterwards; None on the CPU."""
    members: Tuple[GroupModelSignature, ...] = field(
        default=(), metadata=list_of(record(GroupModelSignature), limits.MAX_GROUP_MODELS)
    )


@dataclass(frozen=True)
class RunSelfTest:
    """daemon → rank: all ranks have joined; run the self-test. All ranks receive this message at once.

    `max_rows`, `allowed_batch_sizes`: as in `Build`.
    """

    max_rows: int = field(default=1, metadata=ROW_COUNT)
    allowed_batch_sizes: Tuple[int, ...] = field(default=(), metadata=BATCH_SIZES)


@dataclass(frozen=True)
class SelfTestDone:
    """rank → daemon: the self-test has run, and everything that this rank compares was right.

    `selftest_digest` is the digest of the compared answer, "" if this rank compares nothing; `selftest_cases` are its
    inputs. A process with a model group sends both for each model in `members`, in their order; these fields are then
    empty.
    """

    selftest_digest: str = field(metadata=DIGEST)
    selftest_cases: SelfTestCases = field(metadata=SELFTEST_CASES)
    row_support: Optional[RowSupport] = field(default=None, metadata=record(RowSupport))
    """None if the rows were not tested."""
    device: Optional[DeviceMemory] = field(default=None, metadata=record(DeviceMemory))
    """The card's memory afterwards; None on the CPU."""
    members: Tuple[SelfTestResult, ...] = field(
        default=(), metadata=list_of(record(SelfTestResult), limits.MAX_GROUP_MODELS)
    )


@dataclass(frozen=True)
class PredictDone:
    """rank → daemon: the `Predict` was run. Another rank sends its result."""

    request: int = field(metadata=integer(0, limits.MAX_COUNT))
