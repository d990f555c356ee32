"""The simulator under the vendor's name, for `import mindspore_lite` with this file's folder on the path."""

from ascendsim import acl
from ascendsim.library.context import Context
from ascendsim.library.model import Model, ModelType
from ascendsim.library.model_group import ModelGroup, ModelGroupFlag
from ascendsim.library.runner import ModelParallelRunner
from ascendsim.library.tensor import DataType, Tensor

__version__ = "2.7.0"
__all__ = ["Context", "DataType", "Model", "ModelGroup", "ModelGroupFlag", "ModelParallelRunner", "ModelType", "Tensor"]

acl.install()
