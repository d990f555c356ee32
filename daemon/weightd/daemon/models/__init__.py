"""Which generation of a model serves, on which device, loaded from what. May import `requests` and `generations`."""
