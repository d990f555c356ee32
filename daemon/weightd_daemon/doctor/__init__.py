"""`weightd doctor`: checks what an Ascend host supports, in child processes, before a model depends on it.

`checks` and `ranks` contain the checks; each inspects a `host` and returns a verdict. `selftest` shares the weights of
a model among real workers. `findings` formats the verdicts. `cli` runs all checks; only `arguments` imports `cli`, when
the command runs. No other package of the daemon imports this package.
"""
