"""Test rows for a model: distinct as far as possible, and reproducible in every process."""

from __future__ import annotations

import enum
import itertools
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from weightd_common.rowtest.bits import Arrays
from weightd_protocol.datatypes import ITEM_BYTES, NUMPY_DTYPE
from weightd_protocol.messages.inference import TensorSignature

# If batched rows differ from single rows, only few may do so: 3.6 % for one known operator.
MAX_TEST_ROWS = 200
"""Number of test rows, which run batched and singly."""

MAX_TEST_BYTES = 64 * 1024 * 1024
"""Maximum size of the kept rows, unless `MIN_TEST_ROWS` rows are larger."""

MIN_TEST_ROWS = 8

_SEED = 20_260_101

_MAX_RANDOM_VALUES = 1024 * 1024

# A model that considers all rows at once, to scale or to select them, reveals this if one row is larger.
_MAGNITUDES = (1.0, 100.0, 0.01)


# All values of a row are special, or one in three, or one in seven.
_SPECIAL_STEPS = (1, 3, 7)


class RowKind(enum.Enum):
    """How the values of the rows are generated. The first usable kind of `row_kinds` is taken."""

    SCALED = "scaled"
    """Floats between -1 and 1, or floats of a sample varied by up to a half, multiplied by 1, 100 or 0.01. Integers are
    0 and 1, or from the sample."""
    UNSCALED = "unscaled"
    """Without a sample: like SCALED, without the factors."""
    INDICES = "indices"
    """Without a sample: floats are also 0 and 1, because they may be indices."""
    PERMUTED = "permuted"
    """The unchanged rows of a sample, then rows with the same values at other positions."""
    SAMPLE = "sample"
    """The unchanged rows of a sample, repeated."""


class SpecialFloats(enum.Enum):
    """Floats for which a library may have separate code, or produce other bits."""

    NAN = "nan"
    """Quiet and signalling NaNs of both signs, whose payloads differ from the one of an invalid operation."""
    INFINITY = "infinity"
    SUBNORMAL = "subnormal"
    NEGATIVE_ZERO = "negative zero"


SPECIALS = tuple(SpecialFloats)


def row_kinds(*, has_sample: bool) -> Tuple[RowKind, ...]:
    """Return the kinds of rows to try, the most revealing first."""
    if has_sample:
        return RowKind.SCALED, RowKind.PERMUTED, RowKind.SAMPLE
    return RowKind.SCALED, RowKind.UNSCALED, RowKind.INDICES


def has_rows(tensor: TensorSignature) -> bool:
    """Return whether the first dimension of an input may be a number of rows."""
    return tensor.shape is not None and tensor.shape[:1] == (-1,)


def generate_values(tensor: TensorSignature, shape: Tuple[int, ...], *numbers: int) -> Any:
    """Return values for an input. They are the same in every process, and differ for different `numbers`."""
    random = _generator(tensor, *numbers)
    dtype = np.dtype(NUMPY_DTYPE[tensor.datatype])
    # The generator produces 8 bytes for each number, so a large array repeats a limited number of values.
    count = int(np.prod(shape, dtype=np.int64))
    drawn = min(count, _MAX_RANDOM_VALUES)
    values = random.uniform(-1.0, 1.0, drawn) if dtype.kind == "f" else _random_indices(random, drawn)
    array = values.astype(dtype)
    return (array if count == drawn else np.resize(array, count)).reshape(shape)


class TestRows:
    """Test rows of a model's inputs. Inputs without rows have the same values for all rows.

    Args:
        inputs: the signatures of the model's inputs.
        shapes: shapes with which the model runs, by input name.
        sample: sample arrays with these shapes, on which the rows are based; None without a sample.
        kind: how the values are generated.
        max_rows: the largest useful number of rows.
        first_index: the index of the first row in the infinite sequence of rows.

    Attributes:
        row_bytes: the size of one row in all inputs that have rows.
        count: the number of rows.
    """

    # pytest would treat a class with this name as tests.
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
        """Whether an input with rows has floats."""
        return any(array.dtype.kind == "f" for array in self._rows.values())

    def with_special_values(self, count: int, specials: Sequence[SpecialFloats]) -> Arrays:
        """Return `count` rows with special values in the floats of every other row.

        The special values fill the row or part of it, at positions that differ between rows.
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
        """Return the inputs for rows with these indices, in this order."""
        return self.select_from({**self._constant_inputs, **self._rows}, indices)

    def select_from(self, inputs: Arrays, indices: Sequence[int]) -> Arrays:
        """Return the rows of `inputs` with these indices, in this order."""
        return {name: array[indices] if name in self._rows else array for name, array in inputs.items()}


def rows_with_special_values(inputs: Arrays, names: Sequence[str], specials: Sequence[SpecialFloats]) -> Any:
    """Return a boolean array that tells for each row whether one of the named inputs has a special value in it."""
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
        dtype: the unsigned integer type of the same size.
        sign: the sign bit.
        infinity: the bits of positive infinity; the bits of NaN without sign are larger.
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


# By the size of a float in bytes.
_MANTISSA_BITS = {2: 10, 4: 23, 8: 52}

# Compares bits, because a library may have configured the processor to treat subnormal numbers as zeros.
_IS_SPECIAL: Mapping[SpecialFloats, Callable[[Any, _Layout], Any]] = {
    SpecialFloats.NAN: lambda bits, layout: (bits & ~layout.sign) > layout.infinity,
    SpecialFloats.INFINITY: lambda bits, layout: (bits & ~layout.sign) == layout.infinity,
    SpecialFloats.SUBNORMAL: lambda bits, layout: (
        ((bits & ~layout.sign) - layout.dtype.type(1)) < layout.min_normal - 1
    ),
    SpecialFloats.NEGATIVE_ZERO: lambda bits, layout: bits == layout.sign,
}


def _special_bits(dtype: Any, specials: Sequence[SpecialFloats]) -> Any:
    """Return the bits of special values of a datatype as unsigned integers."""
    layout = _float_layout(dtype)
    sign, infinity, least = map(int, layout[1:])
    quiet = infinity | least >> 1
    values = {
        SpecialFloats.NAN: [infinity | 1, quiet, quiet | 5, sign | infinity | 2, sign | quiet, sign | quiet | 3],
        SpecialFloats.INFINITY: [infinity, sign | infinity],
        SpecialFloats.SUBNORMAL: [1, sign | 1, least - 1],
        SpecialFloats.NEGATIVE_ZERO: [sign],
    }
    # Interleaved, so that a short prefix contains every kind.
    turns = itertools.zip_longest(*[values[special] for special in specials])
    return np.array([each for turn in turns for each in turn if each is not None], layout.dtype)


def row_bytes(inputs: Sequence[TensorSignature], shapes: Mapping[str, Tuple[int, ...]]) -> int:
    """Return the size of one row in all inputs that have rows."""
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
    # numpy guarantees the random stream of RandomState. It depends on the input's name, to detect swapped inputs.
    return np.random.RandomState([_SEED, *numbers, *tensor.name.encode()])


def _random_indices(random: Any, count: int) -> Any:
    """Return random zeros and ones, which are valid indices of every embedding."""
    return random.randint(0, 2, count)
