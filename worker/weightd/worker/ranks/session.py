"""The life of a rank: it says which slice it has, joins its group, runs the canary with all others, then requests."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Mapping, NamedTuple, Union

from weightd.protocol.errors import RemoteProtocolError
from weightd.protocol.messages.children import Back, Hello, ChildOrder, Ping, Pong, Settle, Skip
from weightd.protocol.messages.ranks import Enter, Entered, Slice, Warm, Warmed
from weightd.shared.cores import parse_cpulist
from weightd.shared.meeting import Meeting
from weightd.worker import exits
from weightd.worker.affinity import keep_to
from weightd.worker.connection import Connection
from weightd.worker.engines.engine import Arrays, ModelSignature
from weightd.worker.engines.ranks import RankEngine, Refused
from weightd.worker.engines.sharing import NotShared
from weightd.worker.lane import LaneConnection
from weightd.worker.life import Life, check, versions
from weightd.worker.ranks.known import Known, Share
from weightd.worker.ranks.lockstep import Lockstep


class Given(NamedTuple):
    """What a rank has been given to load.

    Attributes:
        model: its slice.
        says: what the file of that says of the model.
        options: of the engine.
        canary: an .npz of what is asked, and of what is right.
        tolerance: how far an answer may be from that.
    """

    model: str
    says: ModelSignature
    options: Mapping[str, Any]
    canary: str
    tolerance: float = 0.0


class RankSession(Life):
    """Serves one rank over one connection.

    Args:
        connection: to the daemon.
        engine: has not entered yet.
        meeting: what it was told of its group.
        given: what it is to load.
    """

    def __init__(
        self, connection: Union[Connection, LaneConnection], engine: RankEngine, meeting: Meeting, given: Given
    ) -> None:
        super().__init__(connection)
        self._engine = engine
        self._meeting = meeting
        self._given = given
        self._lockstep = Lockstep(engine, self._answer, self._out_of_step, replies=meeting.has_outputs)
        self._predictor = self._lockstep
        self._signature = given.says
        self._has_entered = False

    def run(self, sha256: str) -> int:
        """As any life; who ends well takes leave."""
        status = super().run(sha256)
        if status == exits.OK and self._has_entered:
            self._engine.leave()
        return status

    def _hello(self, sha256: str) -> Hello:
        inputs, outputs = self._given.says
        return Hello(
            str(os.getpid()),
            sha256,
            versions(self._engine.versions()),
            NotShared.traits,
            slice=Slice(self._meeting.rank, inputs, outputs),
        )

    def _do(self, order: ChildOrder) -> None:
        if isinstance(order, Enter):
            self._enter()
        elif isinstance(order, Warm):
            self._warm(order)
        elif isinstance(order, Ping):
            # Not by the canary: that all ranks would have to run.
            self._send(Pong())
        elif not isinstance(order, Settle):
            raise RemoteProtocolError(f"type: expected what a rank is told, got {type(order).__name__.lower()}")

    def _enter(self) -> None:
        self._engine.enter()
        self._has_entered = True
        self._signature = self._engine.load(self._given.model, self._given.options)
        check(self._signature)
        self._send(Entered(self._signature.inputs, self._signature.outputs, self._engine.memory()))

    def _warm(self, order: Warm) -> None:
        """Run what all ranks run now: that hangs on the order and on the canary's file, and on no answer."""
        meeting, given = self._meeting, self._given
        share = None
        if meeting.has_outputs:
            share = Share() if meeting.reply is not None else Share(meeting.rank, meeting.size)
        known = Known(given.canary, self._signature, share, given.tolerance)
        answer = self._engine.predict(known.inputs)
        more, why = known.more(order.sizes) if order.rows > 1 else ({}, "")
        outputs: Arrays = {}
        if more:
            try:
                outputs = self._engine.predict(more)
            except Refused as error:
                why = f"the model does not run on another number of rows than the canary has: {error}"
        digest = known.digest_of(answer)
        if known.divided:
            self._lockstep.divide(known.divided, meeting.size)
        rows = known.rows(more, outputs, why) if order.rows > 1 else None
        if meeting.cores:
            # All threads are there by now. A core that is gone since costs time, and nothing else.
            with contextlib.suppress(OSError):
                keep_to(parse_cpulist(meeting.cores))
        self._send(Warmed(digest, (known.case,), rows, self._engine.memory()))

    def _back(self) -> Back:
        return Back(self._lockstep.step)

    def _skip(self, order: Skip) -> None:
        raise RemoteProtocolError("type: expected no skip: what one rank runs, all run")

    def _when_quiet(self) -> None:
        """Do nothing."""

    def _out_of_step(self, cause: str) -> int:
        return self._broken(cause, exits.SPOILT)
