"""Holder and worker processes: the holder builds a model and exports its weights, workers attach and run requests.

The package runs on CPython 3.7 and later, because vendors' wheels pin the interpreter. Besides the engine it needs
numpy, pyzmq and msgpack. The daemon starts it as ``python -m weightd_worker``.

Layers from top to bottom, where no module imports from a layer above: `__main__`, `main_loop`, `sessions`,
`predictor`, `batch_guard`, `selftest`, `engines`, `pagesharing`, `connection`.
"""
