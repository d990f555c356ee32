"""`weightd doctor`: what an Ascend host can do, found out in child processes before a model depends on it.

`facts` are gathered: from files, from npu-smi, from the model's interpreter. `selftest` shares a model's weights among
real workers. `checks` judge what these have found, without I/O; `render` prints. `cli` has them all, and nobody but
`__main__` has it. Imports processes (what is started, and how), generations, config and platform; no other package of
the daemon imports this one.
"""
