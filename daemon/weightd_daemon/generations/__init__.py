"""Generations: copies of a model's weights with their processes. They decide without I/O, from events and the clock."""
