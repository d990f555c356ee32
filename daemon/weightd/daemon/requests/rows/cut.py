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
        # Each part writes its own rows, as long as that is nothing that another one has still to read.
        self._rooms = {
            index: output_location
            for index, output_location in request.places.outputs.items()
            if output_location.nbytes % form.rows == 0 and not any(map(output_location.overlaps, request.places.inputs.values()))
        }
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
        """Return the tensors of these rows: the frames, and the places of those that have none, and of the outputs."""
        places = self.request.places
        rest = iter(self.request.frames)
        frames: list[Any] = []
        placed: dict[int, Place] = {}
        for index, spec in enumerate(self.request.description.inputs):
            row_bytes = spec.nbytes // self.form.rows
            location = places.inputs.get(index)
            if location is None:
                frame = next(rest)
                begin = first * row_bytes
                frames.append(memoryview(frame)[begin : begin + rows * row_bytes] if self._has_rows(spec) else frame)
            else:
                placed[index] = self._slice(location, first, rows) if self._has_rows(spec) else location
        rooms = {index: self._slice(output_location, first, rows) for index, output_location in self._rooms.items()}
        return frames, Places(placed, rooms) if placed or rooms else NOWHERE

    def add(self, first: int, rows: int, result: Result, frames: Sequence[Any]) -> tuple[Result, list[Any]] | None:
        """Rows have been answered; return the answer to the request, with its frames, if those were the last.

        Raises:
            RequestError: the answers cannot be put together.
        """
        placed, rest = result.placed or (), iter(frames)
        if not self._rooms.keys() >= {*placed}:
            raise Internal(f"outputs {list(placed)} of a part: expected frames where there was no room, got none")
        # Frames may be views of what is received into next.
        contents = [
            self._slice(self._rooms[index], first, rows).part(0, nbytes) if index in placed else bytes(next(rest))
            for index, nbytes in enumerate(result.description.sizes)
        ]
        piece = Piece(rows, result.description, contents)
        self._pieces[first] = piece
        self._answered += rows
        self._nbytes += sum(map(len, piece.frames))
        if self._nbytes > limits.MAX_FRAME_BYTES:
            raise ResourceExhausted(f"the answer has more than {limits.MAX_FRAME_BYTES} bytes")
        if self._answered < self.form.rows:
            return None
        description, whole = joined([self._pieces[each] for each in sorted(self._pieces)], self.terms.outputs)
        there = tuple(index for index, each in enumerate(whole) if isinstance(each, Place))
        frames = [each for index, each in enumerate(whole) if index not in there]
        return Result(self.request.number, description, there or None), frames

    def _slice(self, place: Place, first: int, rows: int) -> Place:
        """Where these rows are of what has all of them."""
        row_bytes = place.nbytes // self.form.rows
        return place.part(first * row_bytes, rows * row_bytes)

    def _has_rows(self, spec: TensorSpec) -> bool:
        return spec.name in self.terms.inputs
