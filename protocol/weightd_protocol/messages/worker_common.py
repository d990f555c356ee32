"""Records that several messages of child processes have in common."""

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
"""How a process was started: by a new interpreter, or forked from a fork server or from a template."""

_NAMES = list_of(text(limits.MAX_NAME_BYTES), limits.MAX_TENSORS)


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a card in bytes: `total_bytes` is the capacity, `free_bytes` what no process of any user has."""

    total_bytes: int = field(metadata=BYTES)
    free_bytes: int = field(metadata=BYTES)


@dataclass(frozen=True)
class RowSupport:
    """Findings of a holder about the rows of its model: tensors whose first dimension each request chooses.

    `inputs` and `outputs` name the tensors that have rows. If either is empty, requests cannot be batched, and `note`
    gives the reason. `is_equal` tells whether batched rows had bit for bit the results of single rows. If not, `note`
    tells which output differed, by how much and with how many rows, or why this was not tested. `batch_digest` is the
    digest of the answer to a predict of many rows, "" if nothing is to be compared. Each number of rows up to
    `compared_rows`, with the other dimensions of the self-test, was compared. `row_kind` names the kind of test rows
    (`weightd_common.rowtest.rows`), to which the digest belongs. `unequal_specials` names kinds of floats: if rows
    contain such values, batched results are not known to equal single results, although they do for other rows.
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
    """Capabilities of an engine's method to share weights.

    - `pids_fixed_at_build`: only processes whose pid the holder knew at its build can attach.
    - `holder_must_outlive`: the shared memory becomes invalid when the holder exits.
    - `attach_rewrites_weights`: an attaching process writes the weights again, from its own model file.
    """

    pids_fixed_at_build: bool = field(metadata=boolean())
    holder_must_outlive: bool = field(metadata=boolean())
    attach_rewrites_weights: bool = field(metadata=boolean())
