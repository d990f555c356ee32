"""What tests, benchmarks and the demo share: models, their conversion, measured memory, the bare engine.

`models` writes ONNX files; `mindir` converts them with MindSpore Lite's own Converter; `memory` reads what
processes really occupy; `plain` is "the engine called directly", in a process of its own, to compare with;
`waiting` waits for what comes without a message.
"""
