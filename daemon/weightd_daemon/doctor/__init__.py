"""`weightd doctor`: checks what an Ascend host supports, in child processes, before a model depends on it.

`checks` and `ranks` are lists of checks, each of which inspects a `host` and returns a verdict. `selftest` shares the
weights of a model among real workers. `findings` prints the verdicts. `cli` runs all checks; only `arguments` imports
it. No other package of the daemon imports this one.
"""
