"""What has run of a model: how many batches, of how many rows, and what was done to make them."""

from __future__ import annotations

from collections.abc import Mapping


class ExecutionCounters:
    """Counts batches that were answered, since the model is served.

    Attributes:
        executions: batches.
        padded_rows: rows that were added to what was asked, because the model takes certain numbers of rows alone.
        split_requests: requests that ran in parts.
        retried_items: parts of batches that ran once more, because of what became of their slot or of those beside
            them.
    """

    def __init__(self) -> None:
        self.executions = 0
        self.padded_rows = 0
        self.split_requests = 0
        self.retried_items = 0
        self._batches_by_power: dict[int, int] = {}

    @property
    def batches_by_rows(self) -> Mapping[int, int]:
        """How many batches had rows up to each power of two, and more than the one before.

        Of others nothing is known.
        """
        return {1 << power: count for power, count in sorted(self._batches_by_power.items())}

    def count_rows(self, rows: int, model_rows: int) -> None:
        """A batch of rows was answered; `model_rows` are those that the model was given, 0 if they are its own."""
        power = (rows - 1).bit_length()
        self._batches_by_power[power] = self._batches_by_power.get(power, 0) + 1
        self.padded_rows += max(0, model_rows - rows)
