# The part of MindSpore Lite that weightd uses. Marked 2.7: absent in 2.0, which is what the registry has.
from enum import Enum
from typing import Any

from numpy.typing import NDArray

__version__: str

class DataType(Enum):
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

class Format(Enum):
    DEFAULT = -1
    NCHW = 0
    NHWC = 1

class ModelType(Enum):
    MINDIR = 0
    MINDIR_LITE = 4

class FmkType(Enum):
    TF = 0
    CAFFE = 1
    ONNX = 2
    MINDIR = 3
    TFLITE = 4
    PYTORCH = 5

class Tensor:
    name: str
    dtype: DataType
    format: Format
    shape: list[int]
    def __init__(self, tensor: object = ...) -> None: ...
    @property
    def data_size(self) -> int: ...
    @property
    def element_num(self) -> int: ...
    def get_data_to_numpy(self) -> NDArray[Any]: ...  # a view, overwritten by the next predict
    def set_data_from_numpy(self, numpy_obj: NDArray[Any]) -> None: ...

class _Cpu:
    inter_op_parallel_num: int
    precision_mode: str
    thread_affinity_core_list: list[int]
    thread_affinity_mode: int
    thread_num: int

class _Ascend:
    device_id: int
    precision_mode: str
    provider: str  # 2.7
    rank_id: int  # 2.7

class _Parallel:
    workers_num: int
    config_info: dict[str, dict[str, str]]
    config_path: str
    device_ids: list[int]  # 2.7

class _Gpu:
    device_id: int
    @property
    def rank_id(self) -> int: ...
    @property
    def group_size(self) -> int: ...

class Context:
    target: list[str]
    group_info_file: str  # 2.7
    cpu: _Cpu
    ascend: _Ascend
    gpu: _Gpu
    parallel: _Parallel
    def __init__(self) -> None: ...

class Model:
    _model: Any  # the native object; in 2.0 the only way to the outputs before a predict
    def __init__(self) -> None: ...
    def build_from_file(
        self,
        model_path: str,
        model_type: ModelType,
        context: Context | None = ...,
        config_path: str = ...,
        config_dict: dict[str, dict[str, str]] | None = ...,  # 2.7
        dec_key: bytes | None = ...,  # 2.7
        dec_mode: str = ...,  # 2.7
    ) -> None: ...
    def get_inputs(self) -> list[Tensor]: ...
    def get_outputs(self) -> list[Tensor]: ...  # 2.7
    def get_model_info(self, key: str) -> str: ...  # 2.7
    def predict(self, inputs: list[Tensor]) -> list[Tensor]: ...
    def resize(self, inputs: list[Tensor], dims: list[list[int]]) -> None: ...
    def update_weights(self, weights: list[list[Tensor]]) -> None: ...  # 2.7

class ModelParallelRunner:
    def __init__(self) -> None: ...
    def build_from_file(self, model_path: str, context: Context | None = ...) -> None: ...
    def get_inputs(self) -> list[Tensor]: ...
    def predict(self, inputs: list[Tensor], outputs: list[Tensor] | None = ...) -> list[Tensor]: ...  # outputs: 2.7

class ModelGroupFlag(Enum):  # 2.7
    SHARE_WEIGHT = 1
    SHARE_WORKSPACE = 2
    SHARE_WEIGHT_WORKSPACE = 3

class ModelGroup:  # 2.7
    def __init__(self, flags: ModelGroupFlag = ...) -> None: ...
    def add_model(self, models: list[str] | list[Model]) -> None: ...
    def cal_max_size_of_workspace(self, model_type: ModelType, context: Context) -> None: ...

class Converter:
    input_shape: dict[str, list[int]]
    optimize: str
    save_type: ModelType
    weight_fp16: bool
    def __init__(self) -> None: ...
    def convert(
        self,
        fmk_type: FmkType,
        model_file: str,
        output_file: str,
        weight_file: str = ...,
        config_file: str = ...,
    ) -> None: ...
