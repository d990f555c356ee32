"""ONNX Runtime: on the CPU, without options of its own."""

from __future__ import annotations

from weightd_daemon.engines import onnx
from weightd_daemon.engines.spec import EngineSpec

# Measured: 1.1 for matrices in raw bytes. What it packs anew, or reads from fields of numbers, is there twice.
SPEC = EngineSpec("onnxruntime", suffix=".onnx", build_factor=2.0, template_threads=1, find_problems=onnx.problems)
