"""`Model` (model.py, base_model.py): type checks, and errors without a reason."""

from __future__ import annotations

import enum
import logging
import os
from typing import Any, Dict, List, Optional

from ascendsim.library import check, groups
from ascendsim.library.context import Context
from ascendsim.library.ge import Session
from ascendsim.library.native import NativeModel, Placement
from ascendsim.library.tensor import Tensor, TensorMeta

_STATUS = "Common error code."


class ModelType(enum.Enum):
    MINDIR = 0
    MINDIR_LITE = 4


class Model:
    """A model. Only its deletion releases memory; after a failed build the memory is never released."""

    def __init__(self) -> None:
        self._model = NativeModel()

    def build_from_file(  # noqa: PLR0917 - the vendor's signature
        self,
        model_path: str,
        model_type: ModelType,
        context: Optional[Context] = None,
        config_path: str = "",
        config_dict: Optional[Dict[str, Dict[str, str]]] = None,
        dec_key: Optional[bytes] = None,
        dec_mode: str = "AES-GCM",
    ) -> None:
        if not os.getenv("ASCEND_CUSTOM_OPP_PATH"):
            # The vendor uses the root logger too, which adds a handler on stderr if the program has none.
            logging.warning("Ascend custom operator path not found")  # noqa: LOG015
        check.instance("model_path", model_path, str)
        check.instance("model_type", model_type, ModelType)
        context = Context() if context is None else context
        check.instance("context", context, Context)
        check.instance("config_path", config_path, str)
        if not os.path.exists(model_path):  # noqa: PTH110 - a str, as in the vendor's code
            raise RuntimeError("build_from_file failed, model_path does not exist!")
        self._configure(config_path, config_dict or {})
        if dec_key:
            check.instance("dec_key", dec_key, bytes)
            check.instance("dec_mode", dec_mode, str)
            if dec_mode == "":
                raise ValueError("dec_mode must not be empty string!")
        ascend = context.ascend
        # A context is valid for one model of a group, and for one calculation (docs runtime_cpp.md).
        is_own = not groups.flags(model_path) or context.use_once()
        placement = Placement(context.get_first_target(), ascend.device_id, ascend.provider, ascend.rank_id)
        placement = placement._replace(group_info=context.group_info_file, is_own=is_own)
        is_mindir = model_type is ModelType.MINDIR
        if not self._model.build(model_path, placement, is_mindir=is_mindir, key=dec_key or b"", mode=dec_mode):
            raise RuntimeError(f"build_from_file failed! Error is {_STATUS}")

    def join(self, session: Session) -> bool:
        """Join a group for "ge"; return False if the model is in one already. Not part of the vendor's API."""
        return self._model.join(session)

    def get_inputs(self) -> List[Tensor]:
        """Return new tensors; before the build, an empty list."""
        return self._model.inputs()

    def get_outputs(self) -> List[TensorMeta]:
        """Return descriptions without data."""
        return [TensorMeta(each.name, each.dtype, each.shape) for each in self._model.outputs()]

    def predict(self, inputs: Any) -> List[Tensor]:
        """Bind inputs by their position, and return views of the model's own memory."""
        check.elements("inputs", inputs, Tensor)
        count = len(self.get_inputs())
        if count != len(inputs):
            raise RuntimeError(f"model input len:{count} not equal input len:{len(inputs)}!")
        results = self._model.predict(inputs)
        if not results:
            raise RuntimeError("predict failed!")
        return results

    def resize(self, inputs: Any, dims: Any) -> None:
        """Set the input shapes. Existing tensors keep the old shape."""
        check.elements("inputs", inputs, Tensor)
        check.elements("dims", dims, list)
        for shape in dims:
            check.elements("dims element", shape, int)
        if len(inputs) != len(dims):
            text = f"but got inputs: {len(inputs)} and dims: {len(dims)}."
            raise ValueError(f"inputs' size does not match dims' size, {text}")
        if not self._model.resize(len(inputs), dims):
            raise RuntimeError(f"resize failed! Error is {_STATUS}")

    def get_model_info(self, key: str) -> str:
        """Return a property of the model, or '' if it is missing."""
        check.instance("key", key, str)
        return self._model.info(key)

    def update_weights(self, weights: Any) -> None:
        """Replace weights of a bundle model on a card. Needs exactly one inner list; with none the process crashes."""
        check.elements("weights", weights, list)
        for each in weights:
            check.elements("weights", each, Tensor)
        if not self._model.update_weights(weights):
            raise RuntimeError(f"update weight failed! Error is {_STATUS}")

    def _configure(self, path: str, sections: Dict[str, Dict[str, str]]) -> None:
        if path:
            if not os.path.exists(path):  # noqa: PTH110 - a str, as in the vendor's code
                raise RuntimeError("build_from_file failed, config_path does not exist!")
            self._model.load_config(path)
        check.instance("config_dict", sections, dict)
        for section, items in sections.items():
            check.instance("config_dict_key", section, str)
            check.instance("config_dict_value", items, dict)
            check.elements("config_dict_value", [*items, *items.values()], str)
            self._model.update_config(section, items)
