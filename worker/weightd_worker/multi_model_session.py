"""The life of a process that serves several models, one predict after another: they share what they work with."""

from __future__ import annotations

import os
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple, Union, cast

from weightd_common import launch_arguments
from weightd_protocol.codec import type_name
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.ranks import (
    GroupModelSignature,
    JoinedGroup,
    JoinGroup,
    RunSelfTest,
    SelfTestDone,
    SelfTestResult,
)
from weightd_protocol.messages.worker import ChildOrder, Hello, Ping, Pong, Predict, Reconnected, TrimStore
from weightd_protocol.messages.worker_common import SelfTestCase, SelfTestCases
from weightd_worker.channel import ChannelConnection
from weightd_worker.connection import WorkerConnection
from weightd_worker.engines.engine import Arrays, Engine
from weightd_worker.engines.errors import BuildError
from weightd_worker.engines.mindspore_lite.group import ModelGroup
from weightd_worker.engines.sharing import NotShared
from weightd_worker.predictor import PredictItem, Predictor
from weightd_worker.regions import RegionTable
from weightd_worker.selftest import sample, selftest, verifier
from weightd_worker.session_base import SessionBase, all_versions, check_signature


class _SelfTestInputs(NamedTuple):
    """What a model is proved by: no case where there is none."""

    cases: SelfTestCases
    sample: Optional[Arrays]


class MultiModelSession(SessionBase):
    """Serves the models of a group over one connection.

    Args:
        connection: to the daemon.
        group: not built yet.
        members: what was told of each model.
    """

    def __init__(
        self,
        connection: Union[WorkerConnection, ChannelConnection],
        group: ModelGroup,
        members: Sequence[launch_arguments.GroupMember],
    ) -> None:
        super().__init__(connection)
        self._group = group
        self._members = members
        self._predictors = _ModelPredictors([Predictor(engine, self._reply) for engine in group.engines])
        self._predictor = cast(Predictor, self._predictors)

    def _make_hello(self, sha256: str) -> Hello:
        return Hello(str(os.getpid()), sha256, all_versions(self._group.engines[0].versions()), NotShared.traits)

    def _handle_order(self, order: ChildOrder) -> None:
        if isinstance(order, JoinGroup):
            self._join_group()
        elif isinstance(order, RunSelfTest):
            self._run_selftests()
        elif isinstance(order, Ping):
            self._send(Pong())
        elif not isinstance(order, TrimStore):
            raise RemoteProtocolError(f"type: expected an order for a group, got {type_name(order)}")

    def _join_group(self) -> None:
        self._group.build()
        signatures = [each.signature for each in self._group.engines]
        for each in signatures:
            check_signature(each)
        self._send(
            JoinedGroup(
                (), (), self._group.engines[0].memory(), tuple(GroupModelSignature(*each) for each in signatures)
            )
        )

    def _run_selftests(self) -> None:
        """Run each self-test before and after those of all others: what they share must change no answer."""
        selftest_inputs = [
            _selftest_inputs_of(engine, each) for engine, each in zip(self._group.engines, self._members)
        ]
        first_runs = [_run_selftest(engine, each) for engine, each in zip(self._group.engines, selftest_inputs)]
        results: List[SelfTestResult] = []
        for number, (engine, inputs, before) in enumerate(zip(self._group.engines, selftest_inputs, first_runs)):
            tolerance = self._members[number].tolerance
            after = _run_selftest(engine, inputs)
            if selftest.difference(before, after) > tolerance:
                path = self._members[number].model
                raise BuildError(f"{path}: the self-test's answer changed when the other models of the group had run")
            predictor = self._predictors.predictors[number]
            predictor.verifier = verifier.AnswerVerifier(engine, before, inputs.sample, tolerance)
            results.append(SelfTestResult(before.digest, inputs.cases))
        self._send(SelfTestDone("", (), None, self._group.engines[0].memory(), tuple(results)))

    def _make_reconnected(self) -> Reconnected:
        return Reconnected(self._predictors.step)

    def _on_idle(self) -> None:
        """Do nothing."""


class _ModelPredictors:
    """The predictors of the models, of which a request names one.

    Attributes:
        regions: the memory of clients, which all have in common.
        step: of the last request that has come.
    """

    def __init__(self, predictors: Sequence[Predictor]) -> None:
        self.predictors = predictors
        self.regions = RegionTable()
        self.step = 0
        for each in predictors:
            each.regions = self.regions

    def predict(self, order: Predict, frames: Sequence[Any]) -> int:
        return self._predictor_of([order]).predict(order, frames)

    def predict_batch(self, items: Sequence[PredictItem], rows: int = 0, principal_ids: Tuple[int, ...] = ()) -> int:
        return self._predictor_of([order for order, _ in items]).predict_batch(items, rows, principal_ids)

    def _predictor_of(self, orders: Sequence[Predict]) -> Predictor:
        members = {order.model_index for order in orders}
        if len(members) != 1 or max(members) >= len(self.predictors):
            raise RemoteProtocolError(f"member: expected one below {len(self.predictors)}, got {sorted(members)}")
        self.step = orders[-1].step
        return self.predictors[members.pop()]


def _selftest_inputs_of(engine: Engine, member: launch_arguments.GroupMember) -> _SelfTestInputs:
    """What a model is asked: its sample, or what is made up where only one shape can be."""
    signature = engine.signature
    if member.sample:
        arrays = sample.load(member.sample, signature)
        case: SelfTestCase = {name: tuple(array.shape) for name, array in arrays.items()}
        return _SelfTestInputs((case,), arrays)
    if any(each.shape is None or -1 in each.shape for each in signature.inputs):
        return _SelfTestInputs((), None)
    return _SelfTestInputs(({each.name: each.shape or () for each in signature.inputs},), None)


def _run_selftest(engine: Engine, selftest_inputs: _SelfTestInputs) -> selftest.SelfTestRun:
    return selftest.run(engine, selftest_inputs.cases, selftest_inputs.sample)
