"""Records that are fields of several messages of child processes."""

from __future__ import annotations

from dataclasses import field
from typing import Dict, Tuple

from weightd_protocol import limits
from weightd_protocol.frozen import dataclass
from weightd_protocol.schema import boolean, integer, list_of, mapping, omit_default, one_of, text

SelfTestCase = Dict[str, Tuple[int, ...]]
"""An input of the self-test, given by the shape of each of the model's inputs. The keys are the names of the inputs."""

SelfTestCases = Tuple[SelfTestCase, ...]

SELFTEST_CASE = mapping(list_of(integer(0, limits.MAX_DIM), limits.MAX_RANK), limits.MAX_TENSORS)
SELFTEST_CASES = list_of(SELFTEST_CASE, limits.MAX_SELFTEST_CASES)
BYTES = integer(0, limits.MAX_COUNT)
ROW_COUNT = integer(1, limits.MAX_ROWS)
BATCH_SIZES = list_of(ROW_COUNT, limits.MAX_ROW_SIZES)
DIGEST = text(limits.MAX_DIGEST_BYTES, empty=True)

ORIGINS = ("spawned", "forked", "template")
"""How a process was created: with a new Python interpreter, forked from a fork server, or forked from a template."""

_NAMES = list_of(text(limits.MAX_NAME_BYTES), limits.MAX_TENSORS)


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a card in bytes.

    `total_bytes` is the capacity of the card. `free_bytes` is the memory that no process of any user occupies.
    """

    total_bytes: int = field(metadata=BYTES)
    free_bytes: int = field(metadata=BYTES)


@dataclass(frozen=True)
class RowSupport:
    """Whether several rows of a model can run in one predict, according to the tests of a holder or rank.

    `inputs` and `outputs` are the names of the tensors that have rows: each request chooses the size of their first
    dimension. If either is empty, requests cannot be batched, and `note` gives the reason. `is_equal` is true if rows
    in a batch had bit for bit the same results as rows that ran alone. If it is false, `note` says which output
    differed, by how much and with how many rows, or why rows were not tested.

    `batch_digest` is the digest of the answer to a predict with many rows, which workers must reproduce; "" if workers
    need not reproduce an answer. The test compared each number of rows up to `compared_rows`, with the other
    dimensions of the self-test. `row_kind` is the kind of the rows in the test (`weightd_common.rowtest.rows`); a
    worker needs it to reproduce `batch_digest`. `unequal_specials` lists kinds of special floats. For rows that
    contain such values, batched results may differ from results of rows that run alone, even if `is_equal` is true.
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
    """The requirements of an engine's way to share weights between processes.

    - `pids_fixed_at_build`: only processes whose pid the holder knew at its build can attach.
    - `holder_must_outlive`: the shared memory becomes invalid when the holder exits.
    - `attach_rewrites_weights`: an attaching process writes the weights again, from its own model file.
    """

    pids_fixed_at_build: bool = field(metadata=boolean())
    holder_must_outlive: bool = field(metadata=boolean())
    attach_rewrites_weights: bool = field(metadata=boolean())


@dataclass(frozen=True)
class AllowAttach:
    """daemon → holder: allow these processes, which did not exist at the build, to attach to the weights."""

    engine_pids: Tuple[str, ...] = field(metadata=list_of(text(limits.MAX_PID_BYTES), limits.MAX_PIDS))


@dataclass(frozen=True)
class AttachAllowed:
    """holder → daemon: the processes may attach. If the engine does not allow this, `error` is the reason."""

    error: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
