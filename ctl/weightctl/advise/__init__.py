"""`weightctl advise`: recommends whether the daemon should batch requests of a model.

`measure` sends requests to the model, `recommend` derives a recommendation from the results, and `command` prints the
recommendation.
"""
