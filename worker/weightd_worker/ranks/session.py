"""The life of a rank: it says which slice it has, joins its group, runs the self-test with all, then requests."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Mapping, NamedTuple, Union

from weightd_common.devices import parse_cpulist
from weightd_common.launch_arguments import RendezvousInfo
from weightd_protocol.codec import type_name
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.ranks import JoinedGroup, JoinGroup, RankSlice, RunSelfTest, SelfTestDone
from weightd_protocol.messages.worker import CancelPredict, ChildOrder, Hello, Ping, Pong, Reconnected, TrimStore
from weightd_worker import exit_codes
from weightd_worker.affinity import set_cpu_affinity
from weightd_worker.channel import ChannelConnection
from weightd_worker.connection import WorkerConnection
from weightd_worker.engines.engine import Arrays, ModelSignature
from weightd_worker.engines.ranks import RankEngine, RankRejected
from weightd_worker.engines.sharing import NotShared
from weightd_worker.ranks.lockstep import LockstepRunner
from weightd_worker.ranks.reference_answer import ReferenceAnswer, RowShare
from weightd_worker.session_base import SessionBase, all_versions, check_signature


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


class RankSession(SessionBase):
    """Serves one rank over one connection.

    Args:
        connection: to the daemon.
        engine: has not entered yet.
        rendezvous: what it was told of its group.
        rank_inputs: what it is to load.
    """

    def __init__(
        self,
        connection: Union[WorkerConnection, ChannelConnection],
        engine: RankEngine,
        rendezvous: RendezvousInfo,
        rank_inputs: RankInputs,
    ) -> None:
        super().__init__(connection)
        self._engine = engine
        self._rendezvous = rendezvous
        self._rank_inputs = rank_inputs
        self._lockstep = LockstepRunner(engine, self._reply, self._fail_out_of_step, is_replying=rendezvous.has_outputs)
        self._predictor = self._lockstep
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

    def _handle_order(self, order: ChildOrder) -> None:
        if isinstance(order, JoinGroup):
            self._join_group()
        elif isinstance(order, RunSelfTest):
            self._run_selftest(order)
        elif isinstance(order, Ping):
            # Not by the self-test: that all ranks would have to run.
            self._send(Pong())
        elif not isinstance(order, TrimStore):
            raise RemoteProtocolError(f"type: expected an order for a rank, got {type_name(order)}")

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

    def _make_reconnected(self) -> Reconnected:
        return Reconnected(self._lockstep.step)

    def _on_cancel_predict(self, order: CancelPredict) -> None:
        raise RemoteProtocolError("type: expected no cancel_predict: what one rank runs, all run")

    def _on_idle(self) -> None:
        """Do nothing."""

    def _fail_out_of_step(self, cause: str) -> int:
        return self._report_failure(cause, exit_codes.MODEL_CORRUPTED)
