"""ONNX Runtime: on the CPU, without options of its own."""

from __future__ import annotations

from weightd.daemon.engines import onnx
from weightd.daemon.engines.spec import EngineSpec

SPEC = EngineSpec("onnxruntime", suffix=".onnx", refusals=onnx.problems)
