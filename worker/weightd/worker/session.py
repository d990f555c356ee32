"""The life of a holder or a worker (`life`): one build, then requests until it is told to stop.

That the process is alive is watched from outside, by its pidfd, and that it answers by pings.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, Sequence, Tuple, Union

from weightd.protocol.codec import clip, encode
from weightd.protocol.errors import InvalidArgument, RemoteProtocolError, RequestError
from weightd.protocol.messages.children import (
    Allow,
    Allowed,
    Attach,
    Attached,
    Build,
    Built,
    Fork,
    Forked,
    Hello,
    ChildOrder,
    Ping,
    Pong,
    Predict,
    Probe,
    Probing,
    Settle,
)
from weightd.protocol.messages.findings import SelfTestCase, SelfTestCases, Rows
from weightd.worker import libraries, nativelog, weights
from weightd.worker.batching import evidence
from weightd.worker.canary import canary, sample, search, shapes
from weightd.worker.canary.proof import Proof
from weightd.worker.connection import Connection
from weightd.worker.engines.engine import Arrays, Engine
from weightd.worker.engines.errors import BuildError, NotAllowed
from weightd.worker.engines.sharing import Shared
from weightd.worker.forking.forker import Forker, Made
from weightd.worker.heap import Heap, own_bytes
from weightd.worker.lane import LaneConnection
from weightd.worker.life import Life, check, versions
from weightd.worker.predictor import Predictor
from weightd.worker.worth import COSTS, is_worth

_log = logging.getLogger("weightd.worker")

_DIFFERS = "the answer of this process to many rows is not that of the one that has found out that they can be so"

_BY_SHAPE = (
    "answers depend on the shapes that the model has computed before: it is built again at each change of shape; "
    "convert it for fixed shapes to avoid that"
)

# Cases of a self-test that was searched for: one, and the same with larger free dimensions.
_SEARCHED = 2

# When nothing is kept for the next predict.
_IDLE_S = 10.0

# How long nothing has come before a worker looks again at what it has run: who comes then waits until that is done.
_AUDIT_S = 0.1

# What no daemon sends: nothing has come for so long.
_AUDIT = Settle()


class Files(NamedTuple):
    """Where a child's files are.

    Attributes:
        model: the model's snapshot.
        store: where the holder may write its page store.
        update: weights that replace those of the model, "" for none.
        sample: what the canary asks, "" where it is made up.
    """

    model: str
    store: str
    update: str = ""
    sample: str = ""

    @property
    def answers(self) -> str:
        """Where the holder leaves the canary's answers for workers whose own may differ a little."""
        return f"{self.store}.answers"


class Origin(NamedTuple):
    """How a process came to be, and why so: see `Hello`; and what it was given, if it was forked from a template."""

    kind: str
    note: str = ""
    made: Optional[Made] = None


class Heirs(NamedTuple):
    """Those who will share what a holder builds.

    Attributes:
        number: how many they are; 0: whether they are worth the holder is not asked.
        forker: forks them, where the holder may be a template: then it takes no requests.
    """

    number: int = 0
    forker: Optional[Forker] = None


_SPAWNED = Origin("spawned")
_NO_HEIRS = Heirs()


class Session(Life):
    """Serves one engine over one connection.

    Args:
        connection: to the daemon.
        engine: not built yet, unless it was made before.
        files: its files.
        tolerance: how far the canary's answers may be apart (`canary.difference`).
        origin: of this process.
        heirs: of a holder.
    """

    def __init__(
        self,
        connection: Union[Connection, LaneConnection],
        engine: Engine,
        files: Files,
        tolerance: float = 0.0,
        *,
        origin: Origin = _SPAWNED,
        heirs: Heirs = _NO_HEIRS,
    ) -> None:
        super().__init__(connection)
        self._engine = engine
        self._files = files
        self._sample: Optional[Arrays] = None
        self._tolerance = tolerance
        self._origin = origin
        self._heirs = heirs
        # What those are given that are forked from this process, once it is a template.
        self._gives: Optional[Made] = None
        self._sha256 = ""
        self._handle = ""
        self._predictor = Predictor(engine, self._answer)
        self._heap = Heap(engine.give_back)
        # On what the model does not run, as far as it is known.
        self._unfit: SelfTestCases = ()

    def _take_predict(self, order: Predict, tensors: Sequence[Any]) -> None:
        if self._heirs.forker is not None:
            raise RemoteProtocolError("type: expected no predict where workers are forked, got one")
        super()._take_predict(order, tensors)

    def _tidy(self) -> None:
        super()._tidy()
        self._heap.bound()
        self._patience_s = _AUDIT_S if self._predictor.is_audit_due else _IDLE_S

    def _when_quiet(self) -> None:
        """What is to be done then comes next, if anything is."""
        if self._predictor.is_audit_due:
            self._inbox.put_back(_AUDIT)
        else:
            self._rest()

    def _rest(self) -> None:
        """Nothing has been asked for a while: keep nothing for what may come."""
        nativelog.bound()
        self._heap.give_back()
        self._tidy_at = 0.0
        self._patience_s = -1.0

    def _hello(self, sha256: str) -> Hello:
        self._sha256 = sha256
        found = versions(self._engine.versions())
        sharing, (origin, note, _) = self._engine.sharing, self._origin
        return Hello(sharing.current_pid(), sha256, found, sharing.traits, origin, note, self._engine.concurrency)

    def _do(self, order: ChildOrder) -> None:
        if isinstance(order, Build):
            self._build(order)
        elif isinstance(order, Attach):
            self._attach(order)
        elif isinstance(order, Fork):
            self._fork(order)
        elif isinstance(order, Allow):
            self._allow(order)
        elif isinstance(order, Ping):
            self._ping(order)
        elif isinstance(order, Settle):
            self._settle(order)

    def _build(self, order: Build) -> None:
        """Build, find the canary, export or be a template; and see that the answers are still the same."""
        engine = self._engine
        before = own_bytes()
        build = functools.partial(self._make, pids=order.pids)
        build()
        check(engine.signature)
        self._load_sample()
        # Each known answer is that of a model that has computed no other shape.
        engine.by_shape = engine.grows
        known = search.find(engine, order, build, self._probing, sample=self._sample, tolerance=self._tolerance)
        first: SelfTestCase = {}
        if engine.grows:
            engine.by_shape, first = self._find_shapes(order, known, build)
        if known.digest and self._tolerance:
            sample.save_answers(self._files.answers, known.answers)
        rows = self._rows(order, known, build)
        if first and rows is not None and not _are_shared(rows, order.exact):
            first = self._largest(known.cases, 1)
        if engine.grew:
            # The holder's memory is shared as it is, so it holds no buffers but those that each worker needs.
            build()
            first = self._compute_first(first, build)
        # What is in memory now is shared as if it were weights.
        known = known._replace(answers=())
        engine.give_back()
        libraries.let_go()
        shared = self._share(known, before)
        self._handle = shared.handle
        if self._handle and known.digest:
            if self._holders_if_near(self._run(known.cases)).digest != known.digest:
                raise BuildError("the canary's answer changed when the weights were shared")
            engine.give_back()
            engine.discard()
            self._heap.trim()
        signature = canary.observed(engine.signature, known)
        self._send(
            Built(
                shared.handle,
                signature.inputs,
                signature.outputs,
                known.cases,
                known.digest,
                shared.bytes,
                clip("; ".join(filter(None, [shared.note, _BY_SHAPE if engine.by_shape else ""]))),
                engine.memory(),
                gears=engine.gears,
                canary_note=clip(known.note),
                is_loss=shared.is_loss,
                is_template=self._gives is not None,
                rows=rows,
                by_shape=engine.by_shape,
                first=first or None,
            )
        )

    def _find_shapes(self, order: Build, known: canary.Canary, rebuild: Callable[[], None]) -> Tuple[bool, SelfTestCase]:
        """Return whether answers depend on the shapes before, and which shape each worker computes first.

        They do if an answer differs after a larger shape. Then, and where there is but one shape, the latter is {}.

        Args:
            order: what the daemon has said.
            known: each answer is that of a model that has computed no other shape.
            rebuild: called where a new model is needed.
        """
        engine, self._unfit = self._engine, self._unfit or order.unfit
        bound = self._largest(known.cases, order.rows)
        first = bound or (known.cases[0] if known.cases else {})
        further = self._run_further(known.cases, first, rebuild) if known.digest else None
        engine.by_shape = False
        if not bound and further is None:
            return False, {}
        rebuild()
        if first in self._unfit:
            first = {}
        else:
            self._probing((first,), self._unfit)
            first = self._compute_first(first, rebuild)
            self._probing((), self._unfit)
        if known.digest and any(self._differs_now(known, further) for _ in range(2)):
            _log.warning("%s", _BY_SHAPE)
            return True, {}
        return False, first

    def _differs_now(self, known: canary.Canary, further: Optional[canary.Canary]) -> bool:
        if canary.difference(known, self._run(known.cases)) > self._tolerance:
            return True
        return further is not None and canary.difference(further, self._run_resized(further.cases[0])) > self._tolerance

    def _run_further(self, cases: SelfTestCases, first: SelfTestCase, rebuild: Callable[[], None]) -> Optional[canary.Canary]:
        """Run a new model on a further shape, if there is one: that tells more than the shapes of the self-test.

        It lies between the two that the search has found. Where there is but one, it is smaller than the first shape.
        """
        signature = self._engine.signature
        case = shapes.between(*cases) if len(cases) == _SEARCHED else shapes.halved(signature, first)
        if case in (*cases, first, *self._unfit):
            return None
        self._probing((case,), self._unfit)
        try:
            return self._run_resized(case)
        except RequestError:
            rebuild()
            return None
        finally:
            self._probing((), self._unfit)

    def _run_resized(self, case: SelfTestCase) -> canary.Canary:
        """Run a shape that is not the sample's."""
        engine = self._engine
        return canary.of((case,), [engine.predict(shapes.inputs(engine.signature, case, self._sample))])

    def _largest(self, cases: SelfTestCases, rows: int) -> SelfTestCase:
        """Return the largest shape that is known to be needed, {} where there is but one shape.

        Raises:
            BuildError: the configured `max_shape` is not one of this model.
        """
        engine = self._engine
        bound = engine.max_shape
        if bound is not None:
            shapes.check_bound(engine.signature, bound)
            return bound
        case = shapes.largest(engine.signature, cases, rows)
        return case if any(case != each for each in cases) else {}

    def _compute_first(self, case: SelfTestCase, rebuild: Callable[[], None]) -> SelfTestCase:
        """Compute this shape first, so that none that it covers causes another build later; return {} if that fails.

        Args:
            case: the shape of each input; {}: none is computed.
            rebuild: called where the model does not run on it.

        Raises:
            BuildError: it is the configured `max_shape`, and the model does not run on it.
        """
        engine = self._engine
        try:
            if case:
                engine.predict(shapes.inputs(engine.signature, case, self._sample))
        except RequestError as error:
            if engine.max_shape is not None:
                raise BuildError(f"options.max_shape: the model does not run on it: {error}") from None
            rebuild()
            return {}
        return case

    def _rows(self, order: Build, known: canary.Canary, rebuild: Callable[[], None]) -> Optional[Rows]:
        self._unfit = self._unfit or order.unfit
        if self._engine.by_shape and order.rows > 1:
            return Rows((), (), equal=False, note=_BY_SHAPE)
        rows = evidence.find(
            self._engine, order, known, rebuild, lambda trying: self._probing(trying, self._unfit), self._sample
        )
        if rows is None or not rows.equal or self._tolerance:
            return rows
        digest = evidence.digest_of(self._engine, known.cases, order.rows, order.sizes, self._sample, rows.values)
        return dataclasses.replace(rows, digest=digest)

    def _share(self, known: canary.Canary, before: int) -> Shared:
        """Share what was built: by a fork where that can be, and where it is held to a canary, else as the engine does.

        What is forked from a model that draws at random would all draw the same.
        """
        forker = self._heirs.forker if known.digest and not self._engine.draws else None
        refusal = forker.refusal() if forker is not None else ""
        if refusal:
            _log.info("workers are not forked from this process: %s", refusal)
            forker = None
        if forker is not None:
            forker.settle()
        took, costs = own_bytes() - before, COSTS[self._origin.kind]
        if not is_worth(took, self._heirs.number, costs):
            text = "weights are not shared: %d MiB, by %d processes, are less than the %d MiB of one that holds them"
            return Shared("", 0, text % (took >> 20, self._heirs.number, costs >> 20))
        if forker is None:
            return self._engine.sharing.export(self._files.store)
        self._gives = Made(self._engine, self._sha256, took)
        return Shared("", took, "")

    def _fork(self, order: Fork) -> None:
        if self._heirs.forker is None or self._gives is None:
            self._tell(Forked(order.name, 0, "this process is no template"))
        else:
            self._heirs.forker.fork(order, self._tell, self._gives)

    def _tell(self, forked: Forked) -> bool:
        return self._connection.send(encode(forked))

    def _make(self, *, pids: Sequence[str] = (), handle: str = "") -> None:
        self._engine.build(self._files.model, pids=pids, handle=handle)
        if self._files.update:
            self._engine.update_weights(weights.load(self._files.update))

    def _allow(self, order: Allow) -> None:
        """That this cannot be is no failure of this process: those that are attached stay so."""
        refusal = ""
        try:
            self._engine.sharing.allow(order.pids)
        except NotAllowed as error:
            refusal = clip(str(error))
        self._send(Allowed(refusal))

    def _attach(self, order: Attach) -> None:
        """Build, do what the holder did before it exported, attach; and give the answers that this process gives.

        What was forked from a template has all that: it only answers.
        """
        engine, made = self._engine, self._origin.made
        engine.by_shape = order.by_shape
        if made is None:
            build = functools.partial(self._make, handle=order.handle)
            build()
            self._load_sample()
            self._compute_first(order.first or {}, build)
            before = self._run(order.canary_cases)
            engine.give_back()
            shared = engine.sharing.attach(order.handle)
            self._handle = order.handle
            answer = self._run(order.canary_cases)
        else:
            self._load_sample()
            before = answer = self._run(order.canary_cases)
            shared = Shared("", made.bytes, "")
        known = self._holders_if_near(answer)
        repeats = canary.difference(before, answer) <= self._tolerance
        self._predictor.proof = Proof(
            engine, known if repeats else known._replace(digest=""), self._sample, self._tolerance
        )
        case = order.canary_cases[0] if order.canary_cases else None
        found = order.found
        # What the holder has compared is known here, too, if it is known that this is the same: `_differs`.
        compared = found.compared if found is not None and (found.digest or made is not None) else 0
        special = () if found is None else found.special
        self._predictor.begin(order.rows, order.sizes, exact=order.exact, case=case, compared=compared, special=special)
        differs = self._differs(order)
        digest = known.digest
        # What the self-test took is the system's again before this process counts as ready. It is what a predict takes
        # all the same: the heap counts it as needed.
        self._heap.keep()
        del before, answer, known
        self._heap.give_back()
        libraries.let_go()
        attached = Attached(digest, shared.bytes, shared.note, engine.memory())
        self._send(attached)
        if differs:
            self._predictor.part(_DIFFERS)

    def _differs(self, order: Attach) -> bool:
        """Whether the answer to many rows is not the holder's. What was forked from a template has that with it."""
        found = order.found
        if found is None or not found.digest or self._origin.made is not None:
            return False
        try:
            digest = evidence.digest_of(
                self._engine, order.canary_cases, order.rows, order.sizes, self._sample, found.values
            )
        except InvalidArgument:
            return True
        self._engine.give_back()
        return digest != found.digest

    def _probing(self, trying: SelfTestCases, unfit: SelfTestCases) -> None:
        """Tell what is run next, and wait until it is known: that may be the end of this process."""
        self._unfit = unfit
        self._send(Probing(trying, unfit))
        if trying:
            order, _ = self._next()
            if not isinstance(order, Probe):
                self._inbox.put_back(order)
                raise BuildError("told to stop while it looked for a canary")

    def _load_sample(self) -> None:
        if self._files.sample:
            self._sample = sample.load(self._files.sample, self._engine.signature)

    def _run(self, cases: SelfTestCases) -> canary.Canary:
        return canary.run(self._engine, cases, self._sample)

    def _holders_if_near(self, answer: canary.Canary) -> canary.Canary:
        """The holder's answers if these are within the tolerance of them: then they are what the process is held to."""
        if not self._tolerance or not Path(self._files.answers).exists():
            return answer
        holders = sample.load_answers(self._files.answers, answer.cases)
        return holders if canary.difference(holders, answer) <= self._tolerance else answer

    def _settle(self, order: Settle) -> None:
        if order is _AUDIT:
            self._predictor.audit()
            self._patience_s = _IDLE_S
        elif self._handle:
            self._engine.sharing.settle(self._handle)

    def _ping(self, order: Ping) -> None:
        self._send(Pong(self._predictor.proof.digest() if order.canary and self._predictor.proof is not None else ""))


def _are_shared(rows: Rows, exact: bool) -> bool:
    """Return whether requests share a predict, after what was found of the model's rows."""
    return bool(rows.inputs) and (rows.equal or not exact)
