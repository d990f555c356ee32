"""`weightctl status`: the models, their processes, their memory, and what sharing saves."""
