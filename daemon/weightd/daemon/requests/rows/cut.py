"""A request that is cut: its rows run in parts, each in a job of its own, and its answer is put together of theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from weightd.daemon.requests.regions import NOWHERE, Place, Places
from weightd.daemon.requests.request import Request
from weightd.daemon.requests.rows.joining import Piece, joined
from weightd.daemon.requests.rows.terms import Form, RowTerms
from weightd.protocol import limits
from weightd.protocol.errors import Internal, ResourceExhausted
from weightd.protocol.messages.children import Result
from weightd.protocol.messages.data import RequestDescription, TensorSpec


class Cut:
    """The rows of one request: which of them are still to be given to a seat, and the answers that have come.

    Attributes:
        request: whose they are.
        terms: of the seats that may run them.
        form: of the request.
        ended: nobody waits for any of it.
    """

    def __init__(self, request: Request, terms: RowTerms, form: Form) -> None:
        self.request = request
        self.terms = terms
        self.form = form
        self.ended = False
        # Pairs of the first row, and the one after the last, in ascending order.
        self._ranges = [(0, form.rows)]
        # By the first row.
        self._pieces: dict[int, Piece] = {}
        self._answered = 0
        self._nbytes = 0
        self._descriptions: dict[int, RequestDescription] = {}

    @property
    def is_pending(self) -> bool:
        """Whether rows have still to be given to a seat."""
        return bool(self._ranges)

    @property
    def next_rows(self) -> int:
        """How many rows `take` gives at most; there are some."""
        first, end = self._ranges[0]
        return end - first

    def take(self, rows: int) -> tuple[int, int]:
        """Return the first of the next rows, and how many of them there are: `rows` at most."""
        first, end = self._ranges.pop(0)
        rows = min(rows, end - first)
        if first + rows < end:
            self._ranges.insert(0, (first + rows, end))
        return first, rows

    def put_back(self, first: int, rows: int) -> None:
        """These were taken, and nobody runs them any more."""
        self._ranges.append((first, first + rows))
        self._ranges.sort()

    def described(self, rows: int) -> RequestDescription:
        """Return what is asked with so many of the rows."""
        found = self._descriptions.get(rows)
        if found is None:
            asked = self.request.description
            inputs = tuple(
                dataclasses.replace(each, shape=(rows, *each.shape[1:])) if self._has_rows(each) else each
                for each in asked.inputs
            )
            found = self._descriptions[rows] = dataclasses.replace(asked, inputs=inputs)
        return found

    def contents(self, first: int, rows: int) -> tuple[list[Any], Places]:
        """Return the tensors of these rows: the frames, and the places of those that have none."""
        places = self.request.places
        rest = iter(self.request.frames)
        frames: list[Any] = []
        placed: dict[int, Place] = {}
        for index, spec in enumerate(self.request.description.inputs):
            row_bytes = spec.nbytes // self.form.rows
            place = places.inputs.get(index)
            if place is None:
                frame = next(rest)
                begin = first * row_bytes
                frames.append(memoryview(frame)[begin : begin + rows * row_bytes] if self._has_rows(spec) else frame)
            elif self._has_rows(spec):
                placed[index] = Place(place.memory, place.offset + first * row_bytes, rows * row_bytes)
            else:
                placed[index] = place
        return frames, Places(placed, {}) if placed else NOWHERE

    def add(self, first: int, rows: int, result: Result, frames: Sequence[Any]) -> tuple[Result, list[Any]] | None:
        """Rows have been answered; return the answer to the request, with its frames, if those were the last.

        Raises:
            RequestError: the answers cannot be put together.
        """
        if result.placed:
            raise Internal(f"outputs {list(result.placed)} of a part: expected a frame, got none")
        # Frames may be views of what is received into next.
        piece = Piece(rows, result.description, [bytes(each) for each in frames])
        self._pieces[first] = piece
        self._answered += rows
        self._nbytes += sum(map(len, piece.frames))
        if self._nbytes > limits.MAX_FRAME_BYTES:
            raise ResourceExhausted(f"the answer has more than {limits.MAX_FRAME_BYTES} bytes")
        if self._answered < self.form.rows:
            return None
        description, whole = joined([self._pieces[each] for each in sorted(self._pieces)], self.terms.outputs)
        return Result(self.request.number, description), whole

    def _has_rows(self, spec: TensorSpec) -> bool:
        return spec.name in self.terms.inputs
