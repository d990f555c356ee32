"""`weightd doctor`: what an Ascend host can do, found out in child processes before a model depends on it.

`checks` and `ranks` are lists of checks, each of which looks at a `host` and gives a verdict; `selftest` shares the
weights of a model among real workers; `findings` prints the verdicts. `cli` runs them all, and nobody but `arguments`
imports it. No other package of the daemon imports this one.
"""
