"""A request, from its queue to its one answer. Plain decisions, fed with events and the clock."""
