"""Sessions of processes that join a model group or a rank group, run the self-test, and then serve requests.

`MultiModelSession` serves all models of a model group, which share memory in one process and run one predict after
another. The session of a rank is in the module `rank`.
"""

from __future__ import annotations

import abc
import os
from typing import Any, ClassVar, List, NamedTuple, Optional, Sequence, Tuple

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
from weightd_protocol.messages.worker import ChildOrder, Hello, Ping, Pong, Predict, TrimStore
from weightd_protocol.messages.worker_common import SelfTestCase, SelfTestCases
from weightd_worker.connection import Connection
from weightd_worker.engines.engine import Arrays, BuildError, Engine, NotShared
from weightd_worker.engines.mindspore_lite.group import ModelGroup
from weightd_worker.predictor import PredictItem, Predictor, RequestRunner
from weightd_worker.regions import RegionTable
from weightd_worker.selftest import sample, selftest
from weightd_worker.sessions.base import Session, all_versions, check_signature


class _SelfTestInputs(NamedTuple):
    """The self-test of one model.

    Attributes:
        cases: the shapes of the inputs; empty if the model has no self-test.
        sample: the inputs; None if they are generated.
    """

    cases: SelfTestCases
    sample: Optional[Arrays]


class GroupSession(Session):
    """Base class of the sessions of model groups and of ranks."""

    _member_kind: ClassVar[str]
    """The kind of this process for error messages: "group" or "rank"."""

    def _handle_order(self, order: ChildOrder) -> None:
        if isinstance(order, JoinGroup):
            self._join_group()
        elif isinstance(order, RunSelfTest):
            self._run_selftest(order)
        elif isinstance(order, Ping):
            # Unlike in other sessions, a ping does not run the self-test, because all ranks would have to run it
            # together.
            self._send(Pong())
        elif not isinstance(order, TrimStore):
            raise RemoteProtocolError(f"type: expected an order for a {self._member_kind}, got {type_name(order)}")

    @abc.abstractmethod
    def _join_group(self) -> None:
        """Join the group, build the model or models, and report the signatures to the daemon."""

    @abc.abstractmethod
    def _run_selftest(self, order: RunSelfTest) -> None:
        """Run the self-test, and report the result to the daemon."""


class MultiModelSession(GroupSession):
    """Session of the process that serves all models of a model group.

    Args:
        connection: the connection to the daemon.
        group: the model group, whose models are not built yet.
        members: the launch arguments of each model, in the order of the group.
    """

    _member_kind = "group"

    def __init__(
        self, connection: Connection, group: ModelGroup, members: Sequence[launch_arguments.GroupMember]
    ) -> None:
        regions = RegionTable()
        self._predictors = [Predictor(engine, self._reply, regions) for engine in group.engines]
        super().__init__(connection, _ModelPredictors(self._predictors, regions))
        self._group = group
        self._members = members

    def _make_hello(self, sha256: str) -> Hello:
        return Hello(str(os.getpid()), sha256, all_versions(self._group.engines[0].versions()), NotShared.traits)

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

    def _run_selftest(self, order: RunSelfTest) -> None:
        """Run the self-tests of all models, then all of them again, and check that no answer has changed.

        A changed answer would show that a model has overwritten shared memory that another model still needs.
        """
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
                raise BuildError(
                    f"{path}: the answer to the self-test changed after the other models of the group had run"
                )
            predictor = self._predictors[number]
            predictor.verifier = selftest.AnswerVerifier(engine, before, inputs.sample, tolerance)
            results.append(SelfTestResult(before.digest, inputs.cases))
        self._send(SelfTestDone("", (), None, self._group.engines[0].memory(), tuple(results)))


class _ModelPredictors(RequestRunner):
    """Runs each request on the predictor of the model that the request names.

    All predictors share one table of clients' shared memory.
    """

    def __init__(self, predictors: Sequence[Predictor], regions: RegionTable) -> None:
        super().__init__(regions)
        self._predictors = predictors

    def predict(self, order: Predict, frames: Sequence[Any]) -> int:
        return self._predictor_of([order]).predict(order, frames)

    def predict_batch(self, items: Sequence[PredictItem], rows: int = 0, principal_ids: Tuple[int, ...] = ()) -> int:
        return self._predictor_of([order for order, _ in items]).predict_batch(items, rows, principal_ids)

    def _predictor_of(self, orders: Sequence[Predict]) -> Predictor:
        members = {order.model_index for order in orders}
        if len(members) != 1 or max(members) >= len(self._predictors):
            raise RemoteProtocolError(
                f"model_index: expected one index below {len(self._predictors)}, got {sorted(members)}"
            )
        self.step = orders[-1].step
        return self._predictors[members.pop()]


def _selftest_inputs_of(engine: Engine, member: launch_arguments.GroupMember) -> _SelfTestInputs:
    """Return a model's self-test: the configured sample, or generated inputs if all dimensions of the model are fixed.

    Without a sample, a model with free dimensions has no self-test.
    """
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
