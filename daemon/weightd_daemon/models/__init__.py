"""Which generation of a model serves, on which device, loaded from what.

Here models, generations, requests and children meet, and what one of them wants is told to the other; no socket is
known, and no process is started but by `processes`. It may import that, `scheduling`, `generations` and what is below.
"""
