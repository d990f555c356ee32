"""A rank's requests: each is run with all other ranks, in the order of their steps, or by none."""

from __future__ import annotations

from typing import Any, Callable, List, Sequence, Tuple, cast

from weightd.protocol.errors import InvalidArgument, RequestError
from weightd.protocol.messages.children import Predict
from weightd.protocol.messages.ranks import Done
from weightd.shared.rowtest.bits import NotTogether
from weightd.worker import exits
from weightd.worker.engines.engine import Arrays, Engine
from weightd.worker.engines.ranks import RankEngine, Refused
from weightd.worker.predictor import Asked, Predictor, Told


class Divided:
    """An engine each of whose ranks answers with its share of the rows: there have to be as many for each.

    What has not is refused alike by all, before any has sent anything to the others.

    Args:
        engine: in a group.
        inputs: that have these rows.
        ranks: how many.
    """

    def __init__(self, engine: RankEngine, inputs: Sequence[str], ranks: int) -> None:
        self._engine = engine
        self._inputs = inputs
        self._ranks = ranks

    def predict(self, inputs: Arrays) -> Arrays:
        """As that of the engine."""
        for name in self._inputs:
            rows = len(inputs[name])
            if rows % self._ranks:
                raise Refused(f"input {name}: expected a multiple of {self._ranks} rows, one for each rank, got {rows}")
        return self._engine.predict(inputs)


class Lockstep(Predictor):
    """Runs requests on an engine that is in a group.

    Nothing is run a second time, or one by one where it came together: what this rank would do alone others do not, and
    its next collective would meet one of theirs that is about another request. What was refused before it was launched
    all ranks refuse; any other failure is the end of this process, and with it of the group.

    Args:
        engine: that has entered.
        answer: sends messages to who has asked.
        broken: tells why this process ends, and returns its exit status.
        replies: whether this rank answers; else it says that it has run what it was asked.

    Attributes:
        step: of the last request that has come.
    """

    def __init__(
        self, engine: RankEngine, answer: Callable[..., None], broken: Callable[[str], int], *, replies: bool
    ) -> None:
        super().__init__(cast(Engine, engine), answer)
        self.step = 0
        self._broken = broken
        self._replies = replies

    def divide(self, inputs: Sequence[str], ranks: int) -> None:
        """From now on as many rows of these inputs are needed for each rank."""
        self._engine = cast(Engine, Divided(cast(RankEngine, self._engine), inputs, ranks))

    def predict(self, order: Predict, frames: Sequence[Any]) -> int:
        """Run the next one."""
        gap = self._gap([order])
        if gap:
            return self._broken(gap)
        if self._replies:
            return super().predict(order, frames)
        try:
            self._engine.predict(self._inputs_of(order, frames))
        except RequestError as error:
            return self._fail(order, error, leaving=True)
        except Exception as error:  # noqa: BLE001 - the request must be answered, whatever a library raises
            return self._fail_unforeseen(order, error)
        self._answer((Done(order.request), ()))
        return exits.OK

    def together(self, parts: Sequence[Asked], rows: int = 0, parties: Tuple[int, ...] = ()) -> int:
        """Run the next ones, each of which has a step of its own, in one predict."""
        gap = self._gap([order for order, _ in parts])
        if gap:
            return self._broken(gap)
        first = parts[0][0]
        try:
            self._run_together(parts, rows)
        except Refused as error:
            for order, _ in parts:
                self._fail(order, error, leaving=False)
        except NotTogether as error:
            return self._fail(first, InvalidArgument(str(error)), leaving=True)
        except RequestError as error:
            return self._fail(first, error, leaving=True)
        except Exception as error:  # noqa: BLE001 - as for one
            return self._fail_unforeseen(first, error)
        return exits.OK

    def _run_together(self, parts: Sequence[Asked], rows: int) -> None:
        joint = self._joint(parts, rows)
        inputs = joint.inputs([self._bytes_of(order, frames) for order, frames in parts])
        if self._replies:
            outputs, shares = self._run(joint, inputs, parts)
            self._share(parts, shares, outputs)
            return
        self._engine.predict(inputs)
        done: List[Told] = [(Done(order.request), ()) for order, _ in parts]
        self._answer(*done)

    def _gap(self, orders: Sequence[Predict]) -> str:
        """Count; return what is wrong with the steps of these, "" if nothing is."""
        for order in orders:
            if order.step != self.step + 1:
                return f"step: expected {self.step + 1}, got {order.step}"
            self.step = order.step
        return ""

    def _fail(self, order: Predict, error: RequestError, *, leaving: bool) -> int:
        return super()._fail(order, error, leaving=not isinstance(error, Refused))
