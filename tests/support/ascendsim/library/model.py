"""`Model` (model.py, base_model.py): checks of types, and failures without a reason."""

from __future__ import annotations

import enum
import functools
import logging
import os
from typing import Any, Callable, Dict, List, Optional, TypeVar, cast

import numpy as np

from ascendsim.library import check
from ascendsim.library.context import Context
from ascendsim.library.load import NativeError, OutOfRange
from ascendsim.library.native import NativeModel, Place
from ascendsim.library.tensor import Tensor, TensorBind, TensorMeta, meta, native

F = TypeVar("F", bound=Callable[..., Any])

_STATUS = "Common error code."


class ModelType(enum.Enum):
    MINDIR = 0
    MINDIR_LITE = 4


def _warn_of_environment(function: F) -> F:
    """Use the root logger as the library does: that gives it a handler on stderr, if the program has set none."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not os.getenv("ASCEND_CUSTOM_OPP_PATH"):
            logging.warning("Ascend custom operator path not found")  # noqa: LOG015
        return function(*args, **kwargs)

    return cast("F", wrapper)


class Model:
    """There is no way to close it but to let go of it; after a failed build not even that gives memory back."""

    def __init__(self) -> None:
        self._model = NativeModel()
        self.model_path_ = ""
        self.provider = ""

    def __str__(self) -> str:
        return f"model_path: {self.model_path_}."

    @_warn_of_environment
    def build_from_file(  # noqa: PLR0917 - the vendor's
        self,
        model_path: str,
        model_type: ModelType,
        context: Optional[Context] = None,
        config_path: str = "",
        config_dict: Optional[Dict[str, Dict[str, str]]] = None,
        dec_key: Optional[bytes] = None,
        dec_mode: str = "AES-GCM",
        dec_num_parallel: int = 0,
    ) -> None:
        check.instance("model_path", model_path, str)
        check.instance("model_type", model_type, ModelType)
        if context is None:
            context = Context()
        check.instance("context", context, Context)
        check.instance("config_path", config_path, str)
        self.provider = context.ascend.provider
        if not os.path.exists(model_path):  # noqa: PTH110 - a str, as there
            raise RuntimeError("build_from_file failed, model_path does not exist!")
        self.model_path_ = model_path
        self._configure(config_path, config_dict)
        if dec_key:
            check.instance("dec_key", dec_key, bytes)
            check.instance("dec_mode", dec_mode, str)
            check.instance("dec_num_parallel", dec_num_parallel, int)
            if dec_mode == "":
                raise ValueError("dec_mode must not be empty string!")
        place = Place(context.get_first_target(), context.ascend.device_id, self.provider)
        is_mindir = model_type is ModelType.MINDIR
        try:
            built = self._model.build(model_path, place, is_mindir=is_mindir, key=dec_key or b"", mode=dec_mode)
        except NativeError as error:
            # What pybind11 makes of std::out_of_range and std::invalid_argument.
            raise (IndexError if isinstance(error, OutOfRange) else ValueError)(str(error)) from None
        if not built:
            raise RuntimeError(f"build_from_file failed! Error is {_STATUS}")

    def get_inputs(self) -> List[Tensor]:
        """New tensors each time; before the build, none."""
        return [Tensor(each) for each in self._model.inputs()]

    def get_outputs(self) -> List[TensorMeta]:
        """Descriptions, without data."""
        return [meta(each) for each in self._model.outputs()]

    def predict(self, inputs: Any, outputs: Optional[List[Tensor]] = None) -> List[Tensor]:
        """Bind inputs by their position, and return views of the model's own memory."""
        if not isinstance(inputs, (list, tuple)):
            raise TypeError(f"inputs must be list or tuple, but got {type(inputs)}.")
        given: List[Any] = [*inputs]
        own = self.get_inputs()
        if len(own) != len(given):
            raise RuntimeError(f"model input len:{len(own)} not equal input len:{len(given)}!")
        for i, each in enumerate(given):
            if isinstance(each, np.ndarray):
                own[i].set_data_from_numpy(each)
            elif isinstance(each, Tensor):
                own[i] = each
            else:
                raise TypeError("inputs element must be Tensor, of numpy.")
        targets = [] if outputs is None else _tensors("outputs", outputs)
        results = self._model.predict([native(each) for each in own])
        if not results or not _fill(targets, results):
            raise RuntimeError("predict failed!")
        return outputs or [Tensor(each) for each in results]

    def resize(self, inputs: Any, dims: Any) -> None:
        """Tensors that were there before keep the old shape."""
        _tensors("inputs", inputs)
        check.elements("dims", dims, list)
        for i, shape in enumerate(dims):
            for j, dim in enumerate(shape):
                if not isinstance(dim, int):
                    text = f"but got {type(dim)} at {i}th dims element's {j}th element."
                    raise TypeError(f"dims element's element must be int, {text}")
        if len(inputs) != len(dims):
            text = f"but got inputs: {len(inputs)} and dims: {len(dims)}."
            raise ValueError(f"inputs' size does not match dims' size, {text}")
        if not self._model.resize(len(inputs), dims):
            raise RuntimeError(f"resize failed! Error is {_STATUS}")

    def get_model_info(self, key: str) -> str:
        """'' for whatever is not there."""
        check.instance("key", key, str)
        return self._model.info(key)

    def update_weights(self, weights: Any) -> None:
        """Only a bundle model on a card, only with exactly one inner list; with none the process crashes."""
        check.instance("weights", weights, list)
        for weight in weights:
            check.instance("weight", weight, list)
        natives = [_tensors("weights", weight) for weight in weights]
        if not self._model.update_weights(natives):
            raise RuntimeError(f"update weight failed! Error is {_STATUS}")

    def _configure(self, path: str, sections: Optional[Dict[str, Dict[str, str]]]) -> None:
        if path:
            if not os.path.exists(path):  # noqa: PTH110 - a str, as there
                raise RuntimeError("build_from_file failed, config_path does not exist!")
            self._model.load_config(path)
        if sections:
            check.sections("config_dict", sections)
            for name, items in sections.items():
                if not self._model.update_config(name, items):
                    raise RuntimeError(f"update configuration failed! Error is {_STATUS}.")


def _tensors(name: str, values: Any) -> List[TensorBind]:
    if not isinstance(values, list):
        raise TypeError(f"{name} must be list, but got {type(values)}.")
    elements: List[Any] = [*values]
    for i, each in enumerate(elements):
        if not isinstance(each, Tensor):
            raise TypeError(f"{name} element must be Tensor, but got {type(each)} at index {i}.")
    return [native(each) for each in elements]


def _fill(targets: List[TensorBind], results: List[TensorBind]) -> bool:
    """Copy results into the caller's tensors, if there are any and they are large enough."""
    if targets and len(targets) != len(results):
        return False
    for target, result in zip(targets, results):
        if target.array is None or target.array.nbytes != result.data_size:
            return False
        target.array.reshape(-1)[:] = result.array.reshape(-1)
        target.shape, target.dtype = list(result.shape), result.dtype
    return True
