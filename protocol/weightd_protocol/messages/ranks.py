"""Messages to and from the ranks of a rank group, and the process that serves a model group.

A model that is cut into slices runs as a rank group: one rank for each slice, all of which start and stop together. The
daemon treats a process that serves all models of a model group like a rank group with a single process; the models of
the model group are the `members` in its messages.
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
    """The number of a rank, and the model's signature as the file of the rank's slice declares it."""

    rank: int = field(metadata=integer(0, limits.MAX_DEVICES - 1))
    """Number of the rank, from 0."""
    inputs: Tuple[TensorSignature, ...] = field(metadata=_SIGNATURES)
    """Inputs of the model according to the slice's file. They are equal in all slices."""
    outputs: Tuple[TensorSignature, ...] = field(metadata=_SIGNATURES)
    """Outputs of the model according to the slice's file. They are equal in all slices."""


@dataclass(frozen=True)
class GroupModelSignature:
    """Signature of one model of a model group."""

    inputs: Tuple[TensorSignature, ...] = field(metadata=_SIGNATURES)
    """Inputs of the model."""
    outputs: Tuple[TensorSignature, ...] = field(metadata=_SIGNATURES)
    """Outputs of the model."""


@dataclass(frozen=True)
class SelfTestResult:
    """Result of the self-test of one model of a model group: its inputs and the digest of its answer."""

    selftest_digest: str = field(metadata=DIGEST)
    """Sha256 of the answer to the self-test; "" if the model has no self-test."""
    selftest_cases: SelfTestCases = field(metadata=list_of(SELFTEST_CASE, 1))
    """Shapes of the inputs on which the self-test ran."""


@dataclass(frozen=True)
class JoinGroup:
    """daemon → each process of a rank group: join the group and load the slice.

    The daemon sends this message when all processes of the group are running. Ranks reply with `JoinedGroup`. The
    broker, through which the ranks find each other, does not reply.
    """


@dataclass(frozen=True)
class JoinedGroup:
    """rank → daemon: this rank has joined the group and loaded its slice.

    `inputs` and `outputs` are the model's signature.

    The process of a model group sends the signature of each model in `members`; its `inputs` and `outputs` are empty.
    """

    inputs: Tuple[TensorSignature, ...] = field(metadata=_SIGNATURES)
    outputs: Tuple[TensorSignature, ...] = field(metadata=_SIGNATURES)
    device: Optional[DeviceMemory] = field(default=None, metadata=record(DeviceMemory))
    """The card's memory after the slice was loaded; None on the CPU."""
    members: Tuple[GroupModelSignature, ...] = field(
        default=(), metadata=list_of(record(GroupModelSignature), limits.MAX_GROUP_MODELS)
    )


@dataclass(frozen=True)
class RunSelfTest:
    """daemon → rank: all ranks have joined the group; run the self-test. The daemon sends this to all ranks at once.

    `max_rows` and `allowed_batch_sizes` are as in `Build`.
    """

    max_rows: int = field(default=1, metadata=ROW_COUNT)
    allowed_batch_sizes: Tuple[int, ...] = field(default=(), metadata=BATCH_SIZES)


@dataclass(frozen=True)
class SelfTestDone:
    """rank → daemon: the self-test has run. All answers that this rank compares were right.

    `selftest_digest` is the digest of the compared answer, "" if this rank compares none. `selftest_cases` are the
    inputs of the self-test. The process of a model group sends digest and inputs of each model in `members`, in the
    order of the models; its own `selftest_digest` and `selftest_cases` are empty.
    """

    selftest_digest: str = field(metadata=DIGEST)
    selftest_cases: SelfTestCases = field(metadata=SELFTEST_CASES)
    row_support: Optional[RowSupport] = field(default=None, metadata=record(RowSupport))
    """Results of the test with several rows; None if rows were not tested."""
    device: Optional[DeviceMemory] = field(default=None, metadata=record(DeviceMemory))
    """The card's memory after the self-test; None on the CPU."""
    members: Tuple[SelfTestResult, ...] = field(
        default=(), metadata=list_of(record(SelfTestResult), limits.MAX_GROUP_MODELS)
    )


@dataclass(frozen=True)
class PredictDone:
    """rank → daemon: this rank has run the `Predict`. Another rank sends the result."""

    request: int = field(metadata=integer(0, limits.MAX_COUNT))
