"""Processes of a rank group: the ranks, which run each request together, and the broker through which they connect.

An answer is correct only if all ranks have run the same requests in the same order. If they have not, no library
detects this. So a rank runs only the requests that the daemon sends, and exits if the step of a request is not the next
one.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any, Callable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, cast

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
from weightd_worker.predictor import PredictItem, Predictor, Reply, SendReply
from weightd_worker.selftest.reference_answer import ReferenceAnswer, RowShare
from weightd_worker.sessions.base import all_versions, check_signature
from weightd_worker.sessions.group import GroupSession

_log = logging.getLogger("weightd.worker")
NO_MODEL_DIGEST = "none"
"""The digest in a broker's HELLO message, because a broker has no model."""

RANK_LOST = 1
"""Exit status of a broker if the ranks have not joined in time, or if a rank was lost."""


class RankInputs(NamedTuple):
    """The files that a rank loads, and its settings for them.

    Attributes:
        model_path: path of the rank's slice.
        file_signature: the model's signature, as stored in the file of the slice.
        options: the options of the engine.
        selftest_path: path of an .npz file with the self-test's inputs and known answers.
        tolerance: the largest allowed difference from the known answers (`selftest.difference`).
    """

    model_path: str
    file_signature: ModelSignature
    options: Mapping[str, Any]
    selftest_path: str
    tolerance: float = 0.0


class RankSession(GroupSession):
    """Session of one rank.

    Args:
        connection: the connection to the daemon.
        engine: the engine, which has not joined the rank group yet.
        rendezvous: the number of the rank, and how it joins its group.
        rank_inputs: the files that the rank loads.
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
        """Run the session as `Session.run` does. If the exit status is OK, leave the rank group."""
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
        """Run the self-test together with the other ranks.

        All ranks must run the same predicts. So the inputs depend only on the daemon's order and the file of the
        self-test, and not on answers, which only some ranks have.
        """
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
            # Bind all threads of the process to its cores. This must happen after the library has started all its
            # threads. Ignore a failure, because it only makes the rank slower.
            with contextlib.suppress(OSError):
                set_cpu_affinity(parse_cpulist(rendezvous.cores))
        self._send(SelfTestDone(digest, (reference.case,), row_support, self._engine.memory()))

    def _on_cancel_predict(self, order: CancelPredict) -> None:
        raise RemoteProtocolError("type: expected no cancel_predict: all ranks must run the same predicts")

    def _fail_out_of_step(self, cause: str) -> int:
        return self._report_failure(cause, exit_codes.MODEL_CORRUPTED)


class RowShardedEngine:
    """Wrapper of a rank's engine for a model whose rows are divided among the ranks: each rank returns its part.

    The number of rows must be a multiple of the number of ranks. All ranks reject other inputs before they send data to
    each other.

    Args:
        engine: the engine of a rank that has joined the group.
        inputs: the names of the inputs whose rows are divided.
        rank_count: the number of ranks.
    """

    def __init__(self, engine: RankEngine, inputs: Sequence[str], rank_count: int) -> None:
        self._engine = engine
        self._sharded_inputs = inputs
        self._rank_count = rank_count

    def predict(self, inputs: Arrays) -> Arrays:
        """Run the model together with the other ranks.

        Raises:
            RankRejected: the rows cannot be divided equally among the ranks.
        """
        for name in self._sharded_inputs:
            rows = len(inputs[name])
            if rows % self._rank_count:
                raise RankRejected(
                    f"input {name}: expected a multiple of {self._rank_count} rows, one for each rank, got {rows}"
                )
        return self._engine.predict(inputs)


class LockstepRunner(Predictor):
    """Runs requests on the engine of a rank, in the same steps as the other ranks.

    Unlike its base class, it never repeats a request and never runs the requests of a batch one by one. The other ranks
    would not do so, and the next collective operation would combine data of different requests. If the engine rejects a
    request before it sends data, all ranks reject it, and only this request fails. After any other failure this process
    exits, and the daemon stops the rank group.

    Args:
        engine: the engine of a rank that has joined the group.
        reply: function that sends replies to the daemon.
        report_failure: function that reports to the daemon why this process exits, and returns the exit status.
        is_replying: whether this rank sends outputs. If not, it only confirms that it has run a request.
    """

    def __init__(
        self, engine: RankEngine, reply: Callable[..., None], report_failure: Callable[[str], int], *, is_replying: bool
    ) -> None:
        super().__init__(cast(Engine, engine), reply)
        self._report_failure = report_failure
        self._is_replying = is_replying

    def shard_rows(self, inputs: Sequence[str], rank_count: int) -> None:
        """From now on, reject requests whose number of rows in `inputs` is not a multiple of `rank_count`."""
        self._engine = cast(Engine, RowShardedEngine(cast(RankEngine, self._engine), inputs, rank_count))

    def predict(self, order: Predict, frames: Sequence[Any], reply: Optional[SendReply] = None) -> int:
        """Run the next request. Return OK, or the exit status if the process must exit."""
        step_error = self._next_step_error([order])
        if step_error:
            return self._report_failure(step_error)
        if self._is_replying:
            return super().predict(order, frames, reply)
        try:
            self._engine.predict(self._input_arrays(order, frames))
        except RequestError as error:
            return self._fail(order, error, is_leaving=True)
        except Exception as error:  # noqa: BLE001 - the request must be answered, whatever a library raises
            return self._fail_unexpected(order, error)
        self._reply((PredictDone(order.request), ()))
        return exit_codes.OK

    def predict_batch(self, items: Sequence[PredictItem], rows: int = 0, principal_ids: Tuple[int, ...] = ()) -> int:
        """Run the next requests in one predict. Each request counts as one step."""
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
        except Exception as error:  # noqa: BLE001 - the requests must be answered, whatever a library raises
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
        """Check that the requests have the next steps, and store the last step. Return "" or an error text."""
        for order in orders:
            if order.step != self.step + 1:
                return f"step: expected {self.step + 1}, got {order.step}"
            self.step = order.step
        return ""

    def _fail(self, order: Predict, error: RequestError, *, is_leaving: bool, reply: Optional[SendReply] = None) -> int:
        return super()._fail(order, error, is_leaving=not isinstance(error, RankRejected), reply=reply)


def run_broker(connection: Connection, serve: Callable[[], None]) -> int:
    """Send HELLO, and run the broker when the daemon sends the order. Return the exit status.

    While the broker runs, this process reads no messages: the library occupies the only thread. With MindSpore, another
    thread could not read them either, because the library holds the GIL. The broker ends when all ranks have left the
    group, or by a signal.

    Args:
        connection: the connection to the daemon.
        serve: function that runs the broker until all ranks have left.
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
    """Run the broker and return the exit status: RANK_LOST if a rank was lost. The log contains the cause.

    The engine's library may also end the broker process itself. It then uses the same exit status.
    """
    try:
        serve()
    except EngineMissing as error:
        _log.error("%s", error)
        return exit_codes.NO_ENGINE
    except WeightdError as error:
        _log.error("%s", error)
        return RANK_LOST
    return exit_codes.OK
