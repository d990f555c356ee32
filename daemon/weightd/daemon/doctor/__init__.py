"""`weightd doctor`: what an Ascend host can do, found out in child processes before a model depends on it.

`host` looks at files and at npu-smi, `interpreter` has the model's interpreter report on itself, `trial` shares a
model's weights among real workers. `checks` and `trial_checks` judge what these found, without I/O; `render` prints.
"""
