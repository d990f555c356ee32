"""Holder and worker processes: the holder builds a model and exports its weights; workers attach and run requests.

The package supports CPython 3.7 and later, because some vendors publish the wheels of their engine only for an old
Python. It needs the engine, numpy, pyzmq and msgpack. The daemon starts it as ``python -m weightd_worker``.

The modules form layers, and no module imports from a layer above its own. From top to bottom: `__main__`, `main_loop`,
`sessions`, `predictor`, `batch_guard`, `selftest`, `engines`, `pagesharing`, `connection`.
"""
