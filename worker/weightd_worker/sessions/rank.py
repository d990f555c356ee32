"""The processes of a rank group, which run each request in lock-step: its ranks, and the broker by which they meet.

A group's answer is right if all ranks ran the same requests in the same order, and no one notices where they did not:
so a rank runs nothing of its own, and ends as soon as it sees that it is not in step.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any, Callable, List, Mapping, NamedTuple, Sequence, Tuple, cast

from weightd_common.devices import parse_cpulist
from weightd_common.launch_arguments import RendezvousInfo
from weightd_common.rowtest.bits import NotBatchable
from weightd_protocol import limits
from weightd_protocol.codec import Decoder, encode, type_name
from weightd_protocol.errors import InvalidArgument, RemoteProtocolError, RequestError, WeightdError
from weightd_protocol.messages.ranks import JoinedGroup, JoinGroup, PredictDone, RankSlice, RunSelfTest, SelfTestDone
from weightd_protocol.messages.worker import (
    TO_CHILD,
    CancelPredict,
    Hello,
    Ping,
    Pong,
    Predict,
    Reconnected,
    Stop,
)
from weightd_worker import exit_codes
from weightd_worker.connection import Connection
from weightd_worker.engines.cpu import set_cpu_affinity
from weightd_worker.engines.engine import Arrays, Engine, EngineMissing, ModelSignature, NotShared
from weightd_worker.engines.ranks import RankEngine, RankRejected
from weightd_worker.predictor import PredictItem, Predictor, Reply
from weightd_worker.selftest.reference_answer import ReferenceAnswer, RowShare
from weightd_worker.sessions.base import all_versions, check_signature
from weightd_worker.sessions.group import GroupSession

_log = logging.getLogger("weightd.worker")
NO_MODEL_DIGEST = "none"
"""What a broker says in the place of a digest."""

RANK_LOST = 1
"""The exit status of one whose ranks have not come, or were lost."""


class RankInputs(NamedTuple):
    """What a rank has been given to load.

    Attributes:
        model_path: its slice.
        file_signature: what the file of that says of the model.
        options: of the engine.
        selftest_path: an .npz of what is asked, and of what is right.
        tolerance: how far an answer may be from that.
    """

    model_path: str
    file_signature: ModelSignature
    options: Mapping[str, Any]
    selftest_path: str
    tolerance: float = 0.0


class RankSession(GroupSession):
    """Serves one rank over one connection.

    Args:
        connection: to the daemon.
        engine: has not entered yet.
        rendezvous: what it was told of its group.
        rank_inputs: what it is to load.
    """

    _member_kind = "rank"

    def __init__(
        self,
        connection: Connection,
        engine: RankEngine,
        rendezvous: RendezvousInfo,
        rank_inputs: RankInputs,
    ) -> None:
        self._lockstep = LockstepRunner(engine, self._reply, self._fail_out_of_step, is_replying=rendezvous.has_outputs)
        super().__init__(connection, self._lockstep)
        self._engine = engine
        self._rendezvous = rendezvous
        self._rank_inputs = rank_inputs
        self._signature = rank_inputs.file_signature
        self._has_joined = False

    def run(self, sha256: str) -> int:
        """As any life; who ends well takes leave."""
        status = super().run(sha256)
        if status == exit_codes.OK and self._has_joined:
            self._engine.leave_group()
        return status

    def _make_hello(self, sha256: str) -> Hello:
        inputs, outputs = self._rank_inputs.file_signature
        return Hello(
            str(os.getpid()),
            sha256,
            all_versions(self._engine.versions()),
            NotShared.traits,
            slice=RankSlice(self._rendezvous.rank, inputs, outputs),
        )

    def _join_group(self) -> None:
        self._engine.join_group()
        self._has_joined = True
        self._signature = self._engine.load(self._rank_inputs.model_path, self._rank_inputs.options)
        check_signature(self._signature)
        self._send(JoinedGroup(self._signature.inputs, self._signature.outputs, self._engine.memory()))

    def _run_selftest(self, order: RunSelfTest) -> None:
        """Run what all ranks run now: that hangs on the order and on the self-test's file, and on no answer."""
        rendezvous, rank_inputs = self._rendezvous, self._rank_inputs
        row_share = None
        if rendezvous.has_outputs:
            row_share = RowShare() if rendezvous.reply_rank is not None else RowShare(rendezvous.rank, rendezvous.size)
        reference = ReferenceAnswer(rank_inputs.selftest_path, self._signature, row_share, rank_inputs.tolerance)
        answer = self._engine.predict(reference.inputs)
        batch_inputs, reason = (
            reference.with_other_row_count(order.allowed_batch_sizes) if order.max_rows > 1 else ({}, "")
        )
        outputs: Arrays = {}
        if batch_inputs:
            try:
                outputs = self._engine.predict(batch_inputs)
            except RankRejected as error:
                reason = f"the model does not run on another number of rows than the self-test has: {error}"
        digest = reference.digest_of(answer)
        if reference.sharded_inputs:
            self._lockstep.shard_rows(reference.sharded_inputs, rendezvous.size)
        row_support = reference.find_row_support(batch_inputs, outputs, reason) if order.max_rows > 1 else None
        if rendezvous.cores:
            # All threads are there by now. A core that is gone since costs time, and nothing else.
            with contextlib.suppress(OSError):
                set_cpu_affinity(parse_cpulist(rendezvous.cores))
        self._send(SelfTestDone(digest, (reference.case,), row_support, self._engine.memory()))

    def _on_cancel_predict(self, order: CancelPredict) -> None:
        raise RemoteProtocolError("type: expected no cancel_predict: what one rank runs, all run")

    def _fail_out_of_step(self, cause: str) -> int:
        return self._report_failure(cause, exit_codes.MODEL_CORRUPTED)


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
    """

    def __init__(
        self, engine: RankEngine, reply: Callable[..., None], report_failure: Callable[[str], int], *, is_replying: bool
    ) -> None:
        super().__init__(cast(Engine, engine), reply)
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


def run_broker(connection: Connection, serve: Callable[[], None]) -> int:
    """Say HELLO, and let ranks find each other once it is told to; return the exit status.

    While it does, it hears nothing: the library has this thread, and MindSpore's the interpreter's lock with it, so
    that no other thread runs either. It ends when the ranks have left, and otherwise by a signal.

    Args:
        connection: to the daemon.
        serve: serves the ranks until they have left.
    """
    connection.send(encode(Hello(str(os.getpid()), NO_MODEL_DIGEST, all_versions({}), NotShared.traits)))
    decoder = Decoder(TO_CHILD, max_bytes=limits.MAX_CHILD_HEADER_BYTES)
    while True:
        messages = connection.receive()
        if messages is None:
            connection.send(encode(Reconnected()))
            continue
        for frames in messages:
            order = decoder.decode(frames)
            if isinstance(order, Stop):
                return exit_codes.OK
            if isinstance(order, Ping):
                connection.send(encode(Pong()))
            elif isinstance(order, JoinGroup):
                return _serve_ranks(serve)
            else:
                raise RemoteProtocolError(f"type: expected join_group, ping or stop, got {type_name(order)}")


def _serve_ranks(serve: Callable[[], None]) -> int:
    """As a broker of the library alone it ends with 1 where a rank was lost; why, its log has as the last words."""
    try:
        serve()
    except EngineMissing as error:
        _log.error("%s", error)
        return exit_codes.NO_ENGINE
    except WeightdError as error:
        _log.error("%s", error)
        return RANK_LOST
    return exit_codes.OK
