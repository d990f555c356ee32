"""What a child has found out of its model and its card: records that several of its messages have in common."""

from __future__ import annotations

from dataclasses import field
from typing import Dict, Tuple

from weightd_protocol import limits
from weightd_protocol.frozen import dataclass
from weightd_protocol.schema import boolean, integer, list_of, mapping, omit_default, one_of, text

SelfTestCase = Dict[str, Tuple[int, ...]]
"""An input of the self-test: the shape of each of the model's inputs, by its name."""

SelfTestCases = Tuple[SelfTestCase, ...]

SELFTEST_CASE = mapping(list_of(integer(0, limits.MAX_DIM), limits.MAX_RANK), limits.MAX_TENSORS)
SELFTEST_CASES = list_of(SELFTEST_CASE, limits.MAX_SELFTEST_CASES)
BYTES = integer(0, limits.MAX_COUNT)
ROW_COUNT = integer(1, limits.MAX_ROWS)
BATCH_SIZES = list_of(ROW_COUNT, limits.MAX_ROW_SIZES)
DIGEST = text(limits.MAX_DIGEST_BYTES, empty=True)

ORIGINS = ("spawned", "forked", "template")
"""How a process came to be: by an interpreter of its own; of a fork server; of the process that built its model."""

_NAMES = list_of(text(limits.MAX_NAME_BYTES), limits.MAX_TENSORS)


@dataclass(frozen=True)
class DeviceMemory:
    """What a card says of its memory, in bytes: all processes of all users together."""

    total_bytes: int = field(metadata=BYTES)
    free_bytes: int = field(metadata=BYTES)


@dataclass(frozen=True)
class RowSupport:
    """What a holder has found of the rows of its model: of tensors whose first dimension is that of each request.

    `inputs` have rows, and `outputs` as many as these; where either has none, no requests can be put together, for the
    reason that `note` gives. `is_equal`: those of many rows were, bit for bit, those of each alone; else `note` says
    which differed, by how much, and of how many rows, or why that was not found out. `batch_digest` is that of the
    answer to a predict of many rows, "" where none is to be compared. `compared_rows`: each number of rows up to this
    one, of the other dimensions that the self-test has, is among those that were compared. `row_kind` names the kind of
    rows that were used (`weightd_common.rowtest.rows.Kind`), of which the digest is. `unequal_specials` are kinds of
    floats: where rows have such values, answers together are not known to be those of each alone, though those of other
        rows are.
    """

    inputs: Tuple[str, ...] = field(metadata=_NAMES)
    outputs: Tuple[str, ...] = field(metadata=_NAMES)
    is_equal: bool = field(metadata=boolean())
    note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    batch_digest: str = field(default="", metadata=DIGEST)
    compared_rows: int = field(default=0, metadata=integer(0, limits.MAX_ROWS))
    row_kind: str = field(default="scaled", metadata=one_of(("scaled", "unscaled", "indices", "permuted", "sample")))
    unequal_specials: Tuple[str, ...] = field(
        default=(), metadata=omit_default(list_of(one_of(("nan", "infinity", "subnormal", "negative zero")), 4))
    )


@dataclass(frozen=True)
class SharingTraits:
    """What an engine's way of sharing can do.

    `pids_fixed_at_build`: only processes whose pid the holder knew at its build can attach.
    `holder_must_outlive`: the shared memory becomes invalid with the holder.
    `attach_rewrites_weights`: an attach writes the weights again, from the file of the one that attaches.
    """

    pids_fixed_at_build: bool = field(metadata=boolean())
    holder_must_outlive: bool = field(metadata=boolean())
    attach_rewrites_weights: bool = field(metadata=boolean())
