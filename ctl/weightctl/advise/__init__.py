"""`weightctl advise`: recommends whether the daemon should batch requests of a model.

`measure` sends the requests, `recommend` compares the results and decides, `command` prints the recommendation.
"""
