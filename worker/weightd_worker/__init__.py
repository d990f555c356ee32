"""Holder and worker processes: the holder builds a model and exports its weights; workers attach and run requests.

The package runs on CPython 3.7 and later, because the wheels of engine vendors require a certain Python version.
Besides the engine it needs numpy, pyzmq and msgpack. The daemon starts it as ``python -m weightd_worker``.

The modules form layers, and no module imports from a layer above its own. From top to bottom: `__main__`, `main_loop`,
`sessions`, `predictor`, `batch_guard`, `selftest`, `engines`, `pagesharing`, `connection`.
"""
