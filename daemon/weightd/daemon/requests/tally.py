"""What has run of a model: how many jobs, of how many rows, and what was done to make them."""

from __future__ import annotations

from collections.abc import Mapping


class Tally:
    """Counts jobs that were answered, since the model is served.

    Attributes:
        executions: jobs.
        padded: rows that were added to what was asked, because the model takes certain numbers of rows alone.
        cuts: requests that ran in parts.
        again: parts of jobs that ran once more, because of what became of their seat or of those beside them.
    """

    def __init__(self) -> None:
        self.executions = 0
        self.padded = 0
        self.cuts = 0
        self.again = 0
        self._rows: dict[int, int] = {}

    @property
    def rows(self) -> Mapping[int, int]:
        """How many jobs had rows up to each power of two, and more than the one before; of others nothing is known."""
        return {1 << power: count for power, count in sorted(self._rows.items())}

    def ran_rows(self, rows: int, padded: int) -> None:
        """A job of rows was answered; `padded` are those that the model was given, 0 if they are its own."""
        power = (rows - 1).bit_length()
        self._rows[power] = self._rows.get(power, 0) + 1
        self.padded += max(0, padded - rows)
