"""`weightd doctor`: what an Ascend host can do, found out in child processes before a model depends on it.

`host_facts` and `interpreter` read what is there; `host`, `access` and `ranks` check it, `selftest` shares a model's
weights among real workers; `findings` prints. `cli` runs them all, and nobody but `arguments` imports it. No other
package of the daemon imports this one.
"""
