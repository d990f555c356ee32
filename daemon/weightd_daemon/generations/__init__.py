"""One copy of the weights: its holder, its workers, its states. Plain decisions: events go in, actions come out."""
