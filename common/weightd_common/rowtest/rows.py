"""Generates the rows of a row test: different from each other as far as possible, and the same in every process."""

from __future__ import annotations

import enum
import itertools
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from weightd_common.rowtest.bits import Arrays
from weightd_protocol.datatypes import ITEM_BYTES, NUMPY_DTYPE
from weightd_protocol.messages.inference import TensorSignature

# The test needs many rows, because often only a few of them have different bits when batched: 3.6 % of the rows for one
# known operator.
MAX_TEST_ROWS = 200
"""Maximum number of test rows, each of which is run batched and singly."""

MAX_TEST_BYTES = 64 * 1024 * 1024
"""Maximum size in bytes, separately for all test rows together, for all kept answers together, and for one batch. But
`MIN_TEST_ROWS` rows and answers, and batches of 2 rows, are always allowed."""

MIN_TEST_ROWS = 8

_SEED = 20_260_101

# Maximum number of values that are drawn for one array, because drawing an image takes longer than a predict of a small
# model. It is a prime number, so that the rows of an array differ although the values repeat.
_MAX_RANDOM_VALUES = 65_521

# Factors for the values of successive rows. If a model scales all rows of a batch by their largest value, a row with
# much larger values changes the answers to the other rows and so reveals this.
_MAGNITUDES = (1.0, 100.0, 0.01)


# In rows with special floats, every value is special, or every third, or every seventh.
_SPECIAL_STEPS = (1, 3, 7)


class RowKind(enum.Enum):
    """How the values of test rows are generated. A row test uses the first suitable kind of `row_kinds`."""

    SCALED = "scaled"
    """Floats are random numbers from -1 to 1, or values of the sample changed by up to a half. Each row's floats are
    multiplied by 1, 100 or 0.01. Integers are random zeros and ones, or values of the sample."""
    UNSCALED = "unscaled"
    """Like SCALED, but floats are not multiplied. Used only without a sample."""
    INDICES = "indices"
    """Floats are random zeros and ones, like integers, because they may be indices. Used only without a sample."""
    PERMUTED = "permuted"
    """First the unchanged rows of the sample, then rows with the values of a sample row in random order."""
    SAMPLE = "sample"
    """The unchanged rows of the sample, repeated."""


class SpecialFloats(enum.Enum):
    """Kinds of special floats, which a library may process with separate code or turn into other bits."""

    NAN = "nan"
    """Quiet and signalling NaNs of both signs, with other payloads than the NaN that an invalid operation produces."""
    INFINITY = "infinity"
    SUBNORMAL = "subnormal"
    NEGATIVE_ZERO = "negative zero"


SPECIALS = tuple(SpecialFloats)


def row_kinds(*, has_sample: bool) -> Tuple[RowKind, ...]:
    """Return the kinds of rows to try in this order: the kind that reveals most differences is first."""
    if has_sample:
        return RowKind.SCALED, RowKind.PERMUTED, RowKind.SAMPLE
    return RowKind.SCALED, RowKind.UNSCALED, RowKind.INDICES


def has_rows(tensor: TensorSignature) -> bool:
    """Return whether an input has rows: its first dimension is free, so that it can be a number of rows."""
    return tensor.shape is not None and tensor.shape[:1] == (-1,)


def generate_values(tensor: TensorSignature, shape: Tuple[int, ...], *numbers: int) -> Any:
    """Return an array of random values for an input. It depends only on the input's name, `shape` and `numbers`."""
    random = _generator(tensor, *numbers)
    dtype = np.dtype(NUMPY_DTYPE[tensor.datatype])
    # A large array repeats its first values, see `_MAX_RANDOM_VALUES`.
    count = int(np.prod(shape, dtype=np.int64))
    drawn = min(count, _MAX_RANDOM_VALUES)
    values = random.uniform(-1.0, 1.0, drawn) if dtype.kind == "f" else _random_indices(random, drawn)
    array = values.astype(dtype)
    return (array if count == drawn else np.resize(array, count)).reshape(shape)


class TestRows:
    """Test rows of a model's inputs. Inputs without rows have the same values for all rows.

    Args:
        inputs: the signatures of the model's inputs.
        shapes: shapes with which the model is known to run, by input name.
        sample: sample arrays with these shapes, on which the rows are based; None without a sample.
        kind: how the values are generated.
        max_rows: the number of rows that the caller needs; more are not generated.
        first_index: where this object's rows begin in the infinite sequence of rows that the kind defines.

    Attributes:
        row_bytes: the size of one row of all inputs together in bytes, without inputs that have no rows.
        count: the number of rows.
    """

    # Without this attribute, pytest would treat a class whose name begins with "Test" as a test.
    __test__ = False

    def __init__(
        self,
        inputs: Sequence[TensorSignature],
        shapes: Mapping[str, Tuple[int, ...]],
        sample: Optional[Arrays] = None,
        kind: RowKind = RowKind.SCALED,
        *,
        max_rows: int = MAX_TEST_ROWS,
        first_index: int = 0,
    ) -> None:
        with_rows = [each for each in inputs if has_rows(each)]
        dims = {each.name: tuple(shapes[each.name][1:]) for each in with_rows}
        self.row_bytes = row_bytes(inputs, shapes)
        self.count = min(max_rows, MAX_TEST_ROWS, max(MIN_TEST_ROWS, MAX_TEST_BYTES // max(self.row_bytes, 1)))
        self._constant_inputs: Arrays = {}
        for each in inputs:
            if not has_rows(each):
                given = None if sample is None else sample[each.name]
                self._constant_inputs[each.name] = (
                    generate_values(each, tuple(shapes[each.name])) if given is None else given
                )
        self._rows: Arrays = {}
        for each in with_rows:
            given = None if sample is None or not len(sample[each.name]) else sample[each.name]
            rows = np.stack(
                [_generate_row(each, dims[each.name], given, kind, first_index + index) for index in range(self.count)]
            )
            if kind is RowKind.SCALED and rows.dtype.kind == "f":
                magnitudes = np.resize(_MAGNITUDES, self.count).astype(rows.dtype)
                rows *= magnitudes.reshape(-1, *[1] * (rows.ndim - 1))
            self._rows[each.name] = rows

    @property
    def has_floats(self) -> bool:
        """Whether any of the inputs with rows contains floats."""
        return any(array.dtype.kind == "f" for array in self._rows.values())

    def with_special_values(self, count: int, specials: Sequence[SpecialFloats]) -> Arrays:
        """Return `count` rows with special values in the floats of every other row.

        The special values are at every position of the row, or at every third or seventh, with varying first positions.
        """
        inputs = self.select([index % self.count for index in range(count)])
        for name, rows in self._rows.items():
            if rows.dtype.kind == "f" and inputs[name].size:
                bits = _special_bits(inputs[name].dtype, specials)
                flat = inputs[name].reshape(count, -1).view(bits.dtype)
                used = 0
                for turn, row in enumerate(range(0, count, 2)):
                    step = min(_SPECIAL_STEPS[turn % len(_SPECIAL_STEPS)], flat.shape[1])
                    position = flat[row, turn % step :: step]
                    position[:] = np.resize(np.roll(bits, -used), position.shape)
                    used += len(position)
        return inputs

    def select(self, indices: Sequence[int]) -> Arrays:
        """Return the model's inputs for a predict of the test rows with these indices, in this order."""
        return self.select_from({**self._constant_inputs, **self._rows}, indices)

    def select_from(self, inputs: Arrays, indices: Sequence[int]) -> Arrays:
        """Return `inputs` with only the rows at these indices, in this order. Inputs without rows are unchanged."""
        return {name: array[indices] if name in self._rows else array for name, array in inputs.items()}


def rows_with_special_values(inputs: Arrays, names: Sequence[str], specials: Sequence[SpecialFloats]) -> Any:
    """Return a boolean array: for each row, whether one of the inputs `names` has a float of the kinds `specials`."""
    found: Any = np.zeros(len(inputs[names[0]]), bool)
    for name in names:
        array = inputs[name]
        if array.dtype.kind == "f" and array.size:
            layout = _float_layout(array.dtype)
            bits = np.ascontiguousarray(array).reshape(len(array), -1).view(layout.dtype)
            for special in specials:
                found |= _IS_SPECIAL[special](bits, layout).any(axis=1)
    return found


class _Layout(NamedTuple):
    """Bit layout of a float type.

    Attributes:
        dtype: the unsigned integer type of the same size as the float type.
        sign: the sign bit.
        infinity: the bits of positive infinity. The bits of a NaN, without the sign bit, are larger.
        min_normal: the bits of the smallest positive normal number.
    """

    dtype: Any
    sign: Any
    infinity: Any
    min_normal: Any


def _float_layout(dtype: Any) -> _Layout:
    unsigned = np.dtype(f"u{dtype.itemsize}")
    sign, min_normal = 1 << (8 * dtype.itemsize - 1), 1 << _MANTISSA_BITS[dtype.itemsize]
    return _Layout(unsigned, *map(unsigned.type, (sign, sign - min_normal, min_normal)))


# Number of mantissa bits of a float type, by its size in bytes.
_MANTISSA_BITS = {2: 10, 4: 23, 8: 52}

# Functions that mark the special floats in an array, by kind. They compare bits instead of numbers, because a library
# may have configured the processor to treat subnormal numbers as zeros.
_IS_SPECIAL: Mapping[SpecialFloats, Callable[[Any, _Layout], Any]] = {
    SpecialFloats.NAN: lambda bits, layout: (bits & ~layout.sign) > layout.infinity,
    SpecialFloats.INFINITY: lambda bits, layout: (bits & ~layout.sign) == layout.infinity,
    SpecialFloats.SUBNORMAL: lambda bits, layout: (
        ((bits & ~layout.sign) - layout.dtype.type(1)) < layout.min_normal - 1
    ),
    SpecialFloats.NEGATIVE_ZERO: lambda bits, layout: bits == layout.sign,
}


def _special_bits(dtype: Any, specials: Sequence[SpecialFloats]) -> Any:
    """Return special floats of these kinds and this float type as an array of unsigned integers with their bits."""
    layout = _float_layout(dtype)
    sign, infinity, least = map(int, layout[1:])
    quiet = infinity | least >> 1
    values = {
        SpecialFloats.NAN: [infinity | 1, quiet, quiet | 5, sign | infinity | 2, sign | quiet, sign | quiet | 3],
        SpecialFloats.INFINITY: [infinity, sign | infinity],
        SpecialFloats.SUBNORMAL: [1, sign | 1, least - 1],
        SpecialFloats.NEGATIVE_ZERO: [sign],
    }
    # Take a value of each kind in turn, so that even a short row contains values of every kind.
    turns = itertools.zip_longest(*[values[special] for special in specials])
    return np.array([each for turn in turns for each in turn if each is not None], layout.dtype)


def row_bytes(inputs: Sequence[TensorSignature], shapes: Mapping[str, Tuple[int, ...]]) -> int:
    """Return the size of one row of all inputs together in bytes, without inputs that have no rows."""
    return sum(
        ITEM_BYTES[each.datatype] * int(np.prod(shapes[each.name][1:], dtype=np.int64))
        for each in inputs
        if has_rows(each)
    )


def _generate_row(tensor: TensorSignature, dims: Tuple[int, ...], sample: Any, kind: RowKind, index: int) -> Any:
    values = generate_values(tensor, dims, 1 + index)
    if sample is None:
        if kind is not RowKind.INDICES or values.dtype.kind != "f":
            return values
        count = min(values.size, _MAX_RANDOM_VALUES)
        return np.resize(
            _random_indices(_generator(tensor, 1 + index), count).astype(values.dtype), values.size
        ).reshape(dims)
    row = sample[index % len(sample)]
    if kind is RowKind.SCALED:
        return (row * (1 + values / 2)).astype(row.dtype) if row.dtype.kind == "f" else row
    if kind is RowKind.PERMUTED and index >= len(sample):
        return _generator(tensor, 1 + index).permutation(row.reshape(-1)).reshape(row.shape)
    return row


def _generator(tensor: TensorSignature, *numbers: int) -> Any:
    # RandomState, because numpy guarantees its random numbers in all versions. The seed includes the input's name, so
    # that inputs have different values and a model with swapped inputs gives another answer.
    return np.random.RandomState([_SEED, *numbers, *tensor.name.encode()])


def _random_indices(random: Any, count: int) -> Any:
    """Return random zeros and ones. As indices, they are valid in every embedding with at least two entries."""
    return random.randint(0, 2, count)
