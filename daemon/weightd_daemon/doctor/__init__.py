"""`weightd doctor`: what an Ascend host can do, found out in child processes before a model depends on it.

`facts` are gathered: from files, from npu-smi, from the model's interpreter. A `trial` shares a model's weights among
real workers. `verdicts` judge what these have found, without I/O; `render` prints. `command` has them all, and nobody
but `__main__` has it. Imports children (what is started, and how), generations, config and host; no other room
imports this one.
"""
