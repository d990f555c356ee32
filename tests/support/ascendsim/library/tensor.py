"""`Tensor` and its types (tensor.py, tensor_numpy_impl.h).

The traps: data is not copied; F-order and big-endian arrays are ignored with a line in the log; only dtype and size
are compared, never the shape; `shape` of a tensor that holds an array cannot be changed.
"""

from __future__ import annotations

import enum
from typing import Any, List, Optional

import numpy as np

from ascendsim import glog
from ascendsim.library import check

Array = Any  # numpy arrays of any dtype


class DataType(enum.Enum):
    UNKNOWN = 0
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
    INVALID = 2147483647


class Format(enum.Enum):
    DEFAULT = -1
    NCHW = 0
    NHWC = 1
    NHWC4 = 2
    HWKC = 3
    HWCK = 4
    KCHW = 5
    CKHW = 6
    KHWC = 7
    CHWK = 8
    HW = 9
    HW4 = 10
    NC = 11
    NC4 = 12
    NC4HW4 = 13
    NCDHW = 15
    NWC = 16
    NCW = 17
    NDHWC = 18
    NC8HW8 = 19


_NUMPY = {
    DataType.BOOL: np.bool_,
    DataType.INT8: np.int8,
    DataType.INT16: np.int16,
    DataType.INT32: np.int32,
    DataType.INT64: np.int64,
    DataType.UINT8: np.uint8,
    DataType.UINT16: np.uint16,
    DataType.UINT32: np.uint32,
    DataType.UINT64: np.uint64,
    DataType.FLOAT16: np.float16,
    DataType.FLOAT32: np.float32,
    DataType.FLOAT64: np.float64,
}


def data_type(name: str) -> Optional[DataType]:
    """The type of this name; None for one that the Python interface does not know, though the library does (BF16)."""
    return DataType.__members__.get(name)


def numpy_type(dtype: Optional[DataType]) -> Any:
    """What numpy is told that the data is: of BF16, that it is float16 (tensor_pybind.cc:232)."""
    return np.float16 if dtype is None else _NUMPY.get(dtype)


class TensorBind:
    """The native tensor."""

    def __init__(
        self, name: str = "", dtype: Optional[DataType] = DataType.FLOAT32, shape: Optional[List[int]] = None
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.shape: List[int] = list(shape or [])
        self.format = Format.NCHW
        self.array: Array = None
        self.holds_numpy = False

    @property
    def element_num(self) -> int:
        count = 1
        for dim in self.shape:
            count *= dim
        return 0 if any(dim < 0 for dim in self.shape) else count

    @property
    def data_size(self) -> int:
        kind = numpy_type(self.dtype)
        return 0 if kind is None else self.element_num * np.dtype(kind).itemsize

    def data(self) -> Array:
        """The data in the tensor's shape, without a copy; zeros if nothing was set."""
        if self.array is None:
            self.array = np.zeros([max(0, dim) for dim in self.shape], numpy_type(self.dtype))
        return self.array.reshape(self.shape) if self.array.size == self.element_num else self.array

    def set_array(self, array: Array) -> None:
        """Keep the array itself; or, if it is not C order and native, nothing at all."""
        if not array.flags.c_contiguous or not array.dtype.isnative:
            glog.error(
                "../python/src/tensor_pybind.cc:88", "SetTensorNumpyData", "Only support C-contiguous native data."
            )
            return
        self.array = array
        self.holds_numpy = True


class TensorMeta:
    """What `Model.get_outputs` gives: a description, without data."""

    def __init__(self) -> None:
        self.name = ""
        self.dtype: Optional[DataType] = DataType.UNKNOWN
        self.shape: List[int] = []
        self.format = Format.DEFAULT
        self.element_num = 0
        self.data_size = 0


class Tensor:
    """A tensor of any origin: a native one, another's data, an array (not copied), or empty."""

    def __init__(self, tensor: Any = None, shape: Any = None, dtype: Any = None, device: Any = None) -> None:
        check.instance("shape", shape, list, none=True)
        check.instance("device", device, str, none=True)
        check.instance("dtype", dtype, DataType, none=True)
        if isinstance(tensor, TensorBind):
            self._tensor = tensor
        elif isinstance(tensor, Tensor):
            self._tensor = _of_array(tensor.get_data_to_numpy(), shape, dtype)
        elif isinstance(tensor, np.ndarray):
            self._tensor = _of_array(tensor, shape, dtype)
        elif tensor is not None:
            raise TypeError(f"tensor must be MindSpore Lite's Tensor or numpy ndarray, but got {type(tensor)}.")
        elif dtype is not None and shape is not None:
            self._tensor = TensorBind("", dtype, shape)
        else:
            self._tensor = TensorBind()

    @property
    def name(self) -> str:
        return self._tensor.name

    @name.setter
    def name(self, name: str) -> None:
        check.instance("name", name, str)
        self._tensor.name = name

    @property
    def dtype(self) -> Optional[DataType]:
        return self._tensor.dtype

    @dtype.setter
    def dtype(self, dtype: DataType) -> None:
        check.instance("dtype", dtype, DataType)
        if self._tensor.holds_numpy:
            glog.info("../python/src/tensor_numpy_impl.h:54", "SetDataType", "Cannot call SetDataType for numpy tensor")
        else:
            self._tensor.dtype = dtype

    @property
    def shape(self) -> List[int]:
        return list(self._tensor.shape)

    @shape.setter
    def shape(self, shape: List[int]) -> None:
        if not isinstance(shape, (list, tuple)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"shape must be list or tuple, but got {type(shape)}.")
        check.elements("shape", list(shape), int)
        if self._tensor.holds_numpy:
            glog.info("../python/src/tensor_numpy_impl.h:50", "SetShape", "Cannot call SetShape for numpy tensor")
        else:
            self._tensor.shape = list(shape)

    @property
    def format(self) -> Format:
        return self._tensor.format

    @format.setter
    def format(self, value: Format) -> None:
        check.instance("format", value, Format)
        self._tensor.format = value

    @property
    def element_num(self) -> int:
        return self._tensor.element_num

    @property
    def data_size(self) -> int:
        return self._tensor.data_size

    @property
    def device(self) -> str:
        return "None:-1"

    def get_data_to_numpy(self) -> Array:
        """A view, never a copy."""
        return self._tensor.data()

    def set_data_from_numpy(self, numpy_obj: Array) -> None:
        check.instance("numpy_obj", numpy_obj, np.ndarray)
        if not numpy_obj.flags["FORC"]:
            numpy_obj = np.ascontiguousarray(numpy_obj)
        dtype = _data_type(numpy_obj)
        if dtype is not self.dtype:
            raise RuntimeError(f"data type not equal! Numpy type: {numpy_obj.dtype.type}, Tensor type: {self.dtype}")
        if numpy_obj.nbytes != self.data_size:
            raise RuntimeError(f"data size not equal! Numpy size: {numpy_obj.nbytes}, Tensor size: {self.data_size}")
        self._tensor.set_array(numpy_obj)


def native(tensor: Tensor) -> TensorBind:
    """The native tensor of one."""
    return tensor._tensor  # pyright: ignore[reportPrivateUsage]


def meta(tensor: TensorBind) -> TensorMeta:
    """The description of a native tensor."""
    result = TensorMeta()
    for each in ("name", "dtype", "shape", "format", "element_num", "data_size"):
        setattr(result, each, getattr(tensor, each))
    return result


def _of_array(array: Array, shape: Any, dtype: Any) -> TensorBind:
    if not array.flags["FORC"]:
        array = np.ascontiguousarray(array)
    found = _data_type(array)
    if shape is not None and list(shape) != list(array.shape):
        raise TypeError(f"user set shape is not equal numpy shape, user shape: {shape}, numpy shape is: {array.shape}.")
    if dtype is not None and dtype is not found:
        raise TypeError(f"user set dtype is not equal numpy dtype, user dtype: {dtype}, numpy dtype is: {array.dtype}.")
    result = TensorBind("", found, list(array.shape))
    result.set_array(array)
    return result


def _data_type(array: Array) -> DataType:
    for dtype, kind in _NUMPY.items():
        if array.dtype.type is kind:
            return dtype
    raise TypeError(f"Unsupported numpy dtype value {array.dtype}")
