"""The processes that hold and run a model: the holder, and the workers that attach to its weights.

Runs on CPython 3.7 and later with numpy, pyzmq and msgpack beside the engine, because vendors' wheels pin the
interpreter. Started by the daemon as ``python -m weightd_worker``.

From top to bottom, and nothing imports upwards: `__main__`, `main_loop`, `sessions`, `predictor`, `batch_guard`,
`selftest`, `engines`, `pagesharing`, `connection`.
"""
