"""`Tensor` and its types (tensor.py, tensor_numpy_impl.h).

Pitfalls: data is not copied; F-order and big-endian arrays are ignored with a line in the log; only dtype and size are
compared, never the shape.
"""

from __future__ import annotations

import enum
from typing import Any, List, NamedTuple, Optional

import numpy as np

from ascendsim import glog
from ascendsim.library import check

Array = Any  # numpy arrays of any dtype


class DataType(enum.Enum):
    BOOL = 30
    INT8 = 32
    INT16 = 33
    INT32 = 34
    INT64 = 35
    UINT8 = 37
    UINT16 = 38
    UINT32 = 39
    UINT64 = 40
    FLOAT16 = 42
    FLOAT32 = 43
    FLOAT64 = 44


_OF_NUMPY = {np.dtype(each.name.lower()).type: each for each in DataType}


def data_type(name: str) -> Optional[DataType]:
    """Return the type of this name, or None for a type that only the native library supports (BF16)."""
    return DataType.__members__.get(name)


def numpy_type(dtype: Optional[DataType]) -> Any:
    """Return numpy's type for a datatype: float16 for BF16 (tensor_pybind.cc:232)."""
    return np.dtype("float16" if dtype is None else dtype.name.lower())


class TensorMeta(NamedTuple):
    """The description of an output, without data: a result of `Model.get_outputs`."""

    name: str
    dtype: Optional[DataType]
    shape: List[int]


class Tensor:
    """A tensor of the model, or a tensor around an array, which is not copied."""

    def __init__(self, tensor: Array = None) -> None:
        self._name = ""
        self._dtype: Optional[DataType] = DataType.FLOAT32
        self._shape: List[int] = []
        self._array: Array = None
        if tensor is not None:
            self._hold(tensor)

    def _hold(self, array: Array) -> None:
        check.instance("tensor", array, np.ndarray)
        self._dtype = _data_type(array)
        self._shape = list(array.shape)
        self.set_data_from_numpy(array)

    @classmethod
    def of(cls, name: str, dtype: Optional[DataType], shape: List[int], array: Array = None) -> Tensor:
        """Create a tensor of the model. Not part of the vendor's API."""
        tensor: Tensor = cls.__new__(cls)
        tensor._name, tensor._dtype, tensor._shape, tensor._array = name, dtype, list(shape), array
        return tensor

    @property
    def name(self) -> str:
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        check.instance("name", name, str)
        self._name = name

    @property
    def dtype(self) -> Optional[DataType]:
        return self._dtype

    @dtype.setter
    def dtype(self, dtype: DataType) -> None:
        check.instance("dtype", dtype, DataType)
        self._dtype = dtype

    @property
    def shape(self) -> List[int]:
        return list(self._shape)

    @shape.setter
    def shape(self, shape: List[int]) -> None:
        check.elements("shape", shape, int)
        if self._array is not None:
            glog.error("../python/src/tensor_pybind.cc:60", "SetShape", "The tensor holds data.")
            return
        self._shape = list(shape)

    @property
    def element_num(self) -> int:
        return 0 if any(dim < 0 for dim in self._shape) else int(np.prod(self._shape, dtype=np.int64))

    @property
    def data_size(self) -> int:
        return self.element_num * int(numpy_type(self._dtype).itemsize)

    def get_data_to_numpy(self) -> Array:
        """Return the data as a view in the tensor's shape, never as a copy; zeros if no data was set."""
        if self._array is None:
            self._array = np.zeros([max(0, dim) for dim in self._shape], numpy_type(self._dtype))
        return self._array.reshape(self._shape) if self._array.size == self.element_num else self._array

    def set_data_from_numpy(self, numpy_obj: Array) -> None:
        """Keep the array itself; ignore it if it is not in C order and native byte order."""
        check.instance("numpy_obj", numpy_obj, np.ndarray)
        if not numpy_obj.flags["FORC"]:
            numpy_obj = np.ascontiguousarray(numpy_obj)
        dtype = _data_type(numpy_obj)
        if dtype is not self._dtype:
            raise RuntimeError(f"data type not equal! Numpy type: {numpy_obj.dtype.type}, Tensor type: {self._dtype}")
        if numpy_obj.nbytes != self.data_size:
            raise RuntimeError(f"data size not equal! Numpy size: {numpy_obj.nbytes}, Tensor size: {self.data_size}")
        if numpy_obj.flags.c_contiguous and numpy_obj.dtype.isnative:
            self._array = numpy_obj
        else:
            text = "Only support C-contiguous native data."
            glog.error("../python/src/tensor_pybind.cc:88", "SetTensorNumpyData", text)


def _data_type(array: Array) -> DataType:
    if array.dtype.type not in _OF_NUMPY:
        raise TypeError(f"Unsupported numpy dtype value {array.dtype}")
    return _OF_NUMPY[array.dtype.type]
