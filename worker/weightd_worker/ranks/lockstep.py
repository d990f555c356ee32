"""A rank's requests: each is run with all other ranks, in the order of their steps, or by none."""

from __future__ import annotations

from typing import Any, Callable, List, Sequence, Tuple, cast

from weightd_common.rowtest.bits import NotBatchable
from weightd_protocol.errors import InvalidArgument, RequestError
from weightd_protocol.messages.ranks import PredictDone
from weightd_protocol.messages.worker import Predict
from weightd_worker import exit_codes
from weightd_worker.engines.engine import Arrays, Engine
from weightd_worker.engines.ranks import RankEngine, RankRejected
from weightd_worker.predictor import PredictItem, Predictor, Reply


class RowShardedEngine:
    """An engine each of whose ranks answers with its share of the rows: there have to be as many for each.

    What has not is refused alike by all, before any has sent anything to the others.

    Args:
        engine: in a group.
        inputs: that have these rows.
        rank_count: how many.
    """

    def __init__(self, engine: RankEngine, inputs: Sequence[str], rank_count: int) -> None:
        self._engine = engine
        self._sharded_inputs = inputs
        self._rank_count = rank_count

    def predict(self, inputs: Arrays) -> Arrays:
        """As that of the engine."""
        for name in self._sharded_inputs:
            rows = len(inputs[name])
            if rows % self._rank_count:
                raise RankRejected(
                    f"input {name}: expected a multiple of {self._rank_count} rows, one for each rank, got {rows}"
                )
        return self._engine.predict(inputs)


class LockstepRunner(Predictor):
    """Runs requests on an engine that is in a group.

    Nothing is run a second time, or one by one where it came together: what this rank would do alone others do not, and
    its next collective would meet one of theirs that is about another request. What was refused before it was launched
    all ranks refuse; any other failure is the end of this process, and with it of the group.

    Args:
        engine: that has entered.
        reply: sends messages to who has asked.
        report_failure: tells why this process ends, and returns its exit status.
        is_replying: whether this rank answers; else it says that it has run what it was asked.

    Attributes:
        step: of the last request that has come.
    """

    def __init__(
        self, engine: RankEngine, reply: Callable[..., None], report_failure: Callable[[str], int], *, is_replying: bool
    ) -> None:
        super().__init__(cast(Engine, engine), reply)
        self.step = 0
        self._report_failure = report_failure
        self._is_replying = is_replying

    def shard_rows(self, inputs: Sequence[str], rank_count: int) -> None:
        """From now on as many rows of these inputs are needed for each rank."""
        self._engine = cast(Engine, RowShardedEngine(cast(RankEngine, self._engine), inputs, rank_count))

    def predict(self, order: Predict, frames: Sequence[Any]) -> int:
        """Run the next one."""
        step_error = self._next_step_error([order])
        if step_error:
            return self._report_failure(step_error)
        if self._is_replying:
            return super().predict(order, frames)
        try:
            self._engine.predict(self._input_arrays(order, frames))
        except RequestError as error:
            return self._fail(order, error, is_leaving=True)
        except Exception as error:  # noqa: BLE001 - the request must be answered, whatever a library raises
            return self._fail_unexpected(order, error)
        self._reply((PredictDone(order.request), ()))
        return exit_codes.OK

    def predict_batch(self, items: Sequence[PredictItem], rows: int = 0, principal_ids: Tuple[int, ...] = ()) -> int:
        """Run the next ones, each of which has a step of its own, in one predict."""
        step_error = self._next_step_error([order for order, _ in items])
        if step_error:
            return self._report_failure(step_error)
        first = items[0][0]
        try:
            self._run_batch(items, rows)
        except RankRejected as error:
            for order, _ in items:
                self._fail(order, error, is_leaving=False)
        except NotBatchable as error:
            return self._fail(first, InvalidArgument(str(error)), is_leaving=True)
        except RequestError as error:
            return self._fail(first, error, is_leaving=True)
        except Exception as error:  # noqa: BLE001 - as for one
            return self._fail_unexpected(first, error)
        return exit_codes.OK

    def _run_batch(self, items: Sequence[PredictItem], rows: int) -> None:
        merged = self._merged_request(items, rows)
        inputs = merged.merge_inputs([self._input_bytes(order, frames) for order, frames in items])
        if self._is_replying:
            outputs, slices = self._run(merged, inputs, items)
            self._reply_slices(items, slices, outputs)
            return
        self._engine.predict(inputs)
        replies: List[Reply] = [(PredictDone(order.request), ()) for order, _ in items]
        self._reply(*replies)

    def _next_step_error(self, orders: Sequence[Predict]) -> str:
        """Count; return what is wrong with the steps of these, "" if nothing is."""
        for order in orders:
            if order.step != self.step + 1:
                return f"step: expected {self.step + 1}, got {order.step}"
            self.step = order.step
        return ""

    def _fail(self, order: Predict, error: RequestError, *, is_leaving: bool) -> int:
        return super()._fail(order, error, is_leaving=not isinstance(error, RankRejected))
