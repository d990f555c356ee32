"""Helpers of tests, benchmarks and the demo: models, their conversion, memory measurements and direct use of engines.

`models` writes ONNX files; `mindir` converts them with MindSpore Lite's Converter; `memory` reads the memory use of
processes; `plain` calls an engine directly in a separate process, as the reference for comparisons; `waiting` polls for
conditions that no message announces.
"""
