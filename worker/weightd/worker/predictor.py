"""A worker's requests: each is run, and answered with what comes of it."""

from __future__ import annotations

import collections
import logging
import operator
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from weightd.protocol import limits
from weightd.protocol.codec import clip
from weightd.protocol.errors import Internal, InvalidArgument, RequestError
from weightd.protocol.messages.children import Failed, Predict, Result, Unequal
from weightd.protocol.messages.data import RequestDescription, ResponseDescription, TensorSpec
from weightd.protocol.messages.findings import SelfTestCase
from weightd.protocol.messages.regions import MappedRegions
from weightd.protocol.tensors import describe_response, frame_of, from_frame, to_wire
from weightd.shared.rowtest.bits import NotTogether
from weightd.shared.rowtest.rows import Special, rows_with_special_values
from weightd.worker import exits
from weightd.worker.batching.joint import Joint, Share
from weightd.worker.batching.trials import RowsDiffer, Trials
from weightd.worker.canary.proof import Proof
from weightd.worker.engines.engine import Arrays, Engine
from weightd.worker.engines.errors import Doubtful, NotRun, Spoilt
from weightd.worker.regions import Regions

_log = logging.getLogger("weightd.worker")

# Jobs of which it is remembered how they are put together, and the most parts of such a one.
_MAX_JOINTS = 64
_MAX_JOINT_PARTS = 64

# Parties whose requests are run one by one. Where there are more, those of all are.
_MAX_APART = limits.MAX_TENANTS

# Requests with special values of a party, after which its requests are not sent together with others any more: each
# costs those that come with it the time of another predict.
_MANY_SPECIAL = 64

Told = Tuple[object, Sequence[Any]]
"""A message, and its tensors."""

Asked = Tuple[Predict, Sequence[Any]]
"""A request, and its tensors that have frames."""

_form = operator.attrgetter("shape", "dtype", "flags.c_contiguous")


class Predictor:
    """Runs requests on an engine that has built the model.

    Args:
        engine: the engine.
        answer: sends messages to who has asked, which go together.

    Attributes:
        regions: the memory of clients that is mapped here.
        proof: what is known of right answers; None before that is known.
    """

    def __init__(self, engine: Engine, answer: Callable[..., None]) -> None:
        self.regions = Regions()
        self.proof: Optional[Proof] = None
        self._engine = engine
        self._answer = answer
        # The last answer that was sent as the engine gave it, and what it was an answer to.
        self._usual: Tuple[Any, ...] = ()
        self._usual_description: Any = None
        self._joints: Dict[Tuple[int, ...], Joint] = {}
        self._sizes: Sequence[int] = ()
        # Whether requests that come together are run so, and by what it is tested that their answers are the same.
        self._joins = True
        self._special: Sequence[Special] = ()
        # How many requests with special values have come of each party.
        self._counts: collections.Counter[int] = collections.Counter()
        # Why requests of these parties are not run together with others.
        self._apart: Dict[int, str] = {}
        self._trials: Optional[Trials] = None

    def predict(self, order: Predict, frames: Sequence[bytes]) -> int:
        """Run the model on what has come, and answer; return the status with which the process is to end, or OK."""
        try:
            asked, regions, placed = order.description, order.regions, None
            inputs = self._inputs_of(order, frames)
            outputs = self._engine.predict(inputs)
            if (asked, *outputs, *map(_form, outputs.values())) == self._usual:
                description = self._usual_description
            else:
                outputs, description = self._checked(asked, inputs, outputs)
            rest = [*map(frame_of, outputs.values())]
            if regions is not None:
                placed, rest = self._placed(regions, rest)
            self._answer((Result(order.request, description, placed), rest))
        except RequestError as error:
            return self._fail(order, error, leaving=not self._survives(error))
        except Exception as error:  # noqa: BLE001 - the request must be answered, whatever a library raises
            return self._fail_unforeseen(order, error)
        return exits.OK

    def _checked(
        self, asked: RequestDescription, inputs: Arrays, outputs: Arrays
    ) -> Tuple[Arrays, ResponseDescription]:
        """What is sent of the engine's answer, and its description.

        All that it takes to find out is known of the request's description, and the names and forms of the outputs.
        Most requests are like the one before: what need not be changed is remembered.
        """
        form = (asked, *outputs, *map(_form, outputs.values()))
        if self.proof is not None:
            outputs = self.proof.checked(inputs, outputs)
        arrays = _sendable(outputs if asked.outputs is None else {name: outputs[name] for name in asked.outputs})
        description = describe_response(asked.model_name, arrays)
        if asked.outputs is None and all(arrays[name] is outputs[name] for name in outputs):
            self._usual, self._usual_description = form, description
        return arrays, description

    def begin(
        self,
        rows: int,
        sizes: Sequence[int],
        *,
        exact: bool,
        case: Optional[SelfTestCase] = None,
        compared: int = 0,
        special: Sequence[str] = (),
    ) -> None:
        """The model is built and attached.

        Args:
            rows: of one predict at most.
            sizes: the only numbers of rows that the model takes; none: any.
            exact: whether the answers to requests that are run together have to be those of each alone, bit for bit.
            case: shapes of inputs; with these, but for the rows, the holder has compared rows.
            compared: each number of rows up to this one.
            special: kinds of floats: requests that have such values are run alone, if answers have to be the same.
        """
        self._special = [Special(each) for each in special] if exact else []
        self._sizes = sorted(sizes)
        self._trials = Trials(self._engine, rows, self._sizes, case, compared) if exact else None

    @property
    def is_audit_due(self) -> bool:
        """Whether requests that were run together are to be run again alone, when nothing else is to be done."""
        return self._trials is not None and self._trials.is_due

    def audit(self) -> None:
        """Run them, and nothing together any more if their answers differ.

        Raises:
            Spoilt: the model is.
        """
        if self._trials is not None:
            try:
                self._trials.again()
            except (NotTogether, InvalidArgument) as error:
                self._learn_difference(error)

    def together(self, parts: Sequence[Asked], rows: int = 0, parties: Tuple[int, ...] = ()) -> int:
        """Run the model once on the rows of several requests, and answer each; return as `predict` does.

        What cannot be run or divided so is run one by one: then only that fails whose fault it is.

        Args:
            parts: the requests, in their order.
            rows: to run it on, if they have less; 0: as many as they have.
            parties: whose each of them is, if it is tested that each has the answer that it has alone.
        """
        try:
            joint = self._joint(parts, rows)
            if len(parts) > 1 and not (self._joins and (self._trials is None or self._trials.takes(joint))):
                return self._one_by_one(parts)
            inputs = joint.inputs([self._bytes_of(order, frames) for order, frames in parts])
            if len(parts) > 1 and (self._apart or self._special):
                alone = self._alone(joint, inputs, parties)
                if alone:
                    return self._without(alone, parts, parties)
            outputs, shares = self._run(joint, inputs, parts, parties)
            return self._share(parts, shares, outputs)
        except NotTogether as error:
            return self._part(parts, error)
        except RequestError as error:
            return self._refused(parts, error)
        except Exception as error:  # noqa: BLE001 - as for one
            return self._fail_unforeseen(parts[0][0], error)

    def _alone(self, joint: Joint, inputs: Arrays, parties: Tuple[int, ...]) -> Sequence[int]:
        """Return the positions of requests that are run alone, because of whose they are or because of their values."""
        found = {index for index, each in enumerate(parties) if each in self._apart}
        # The daemon does not know of these parties yet, or is another one than that which does.
        for party in sorted({parties[index] for index in found}):
            self._answer((Unequal(self._apart[party], (party,)), ()))
        if self._special:
            names = [each.name for each in joint.specs]
            special = joint.parts_of(rows_with_special_values(inputs, names, self._special))
            found.update(special)
            if special and parties:
                self._count_special([parties[index] for index in special])
        return sorted(found)

    def _count_special(self, parties: Sequence[int]) -> None:
        if len(self._counts) >= _MAX_APART:
            self._counts.clear()
        self._counts.update(parties)
        many = [each for each in dict.fromkeys(parties) if self._counts[each] >= _MANY_SPECIAL]
        if many and len(self._apart) < _MAX_APART:
            kinds = ", ".join(each.value for each in self._special)
            self._learn_difference(RowsDiffer(f"many have values that are run alone ({kinds})", many))

    def _without(self, alone: Sequence[int], parts: Sequence[Asked], parties: Tuple[int, ...]) -> int:
        """Run some of the requests one by one, and the others together."""
        others = [index for index in range(len(parts)) if index not in alone]
        whose = tuple([parties[index] for index in others]) if parties else ()
        status = self.together([parts[index] for index in others], 0, whose) if others else exits.OK
        return self._one_by_one([parts[index] for index in alone]) if status == exits.OK else status

    def _run(
        self, joint: Joint, inputs: Arrays, parts: Sequence[Asked], parties: Tuple[int, ...] = ()
    ) -> Tuple[Arrays, Sequence[Share]]:
        outputs = self._engine.predict(inputs)
        form = (*outputs, *map(_form, outputs.values()))
        if form != joint.form:
            outputs = self._learned(joint, inputs, outputs, form)
        # Another thread may learn others while this one runs the model again.
        shares = joint.shares
        if self._trials is not None and len(parts) > 1:
            self._trials.check(joint, inputs, outputs, parties)
        return outputs, shares

    def _share(self, parts: Sequence[Asked], shares: Sequence[Share], outputs: Arrays) -> int:
        """Give each request what it has of the answer."""
        all_bytes = [*map(frame_of, outputs.values())]
        results: List[Told] = []
        for (order, _), (description, cuts) in zip(parts, shares):
            placed, rest = None, [all_bytes[output][begin:end] for output, begin, end in cuts]
            try:
                if order.regions is not None:
                    placed, rest = self._placed(order.regions, rest)
                results.append((Result(order.request, description, placed), rest))
            except RequestError as error:
                self._fail(order, error, leaving=False)
        self._answer(*results)
        return exits.OK

    def part(self, note: str) -> None:
        """Run nothing together any more, for the reason that `note` gives."""
        if self._joins:
            _log.warning("no requests are run together any more: %s", note)
            self._joins = False
            self._answer((Unequal(clip(note)), ()))

    def _learn_difference(self, error: Exception) -> None:
        """Run no requests together any more of the parties whose rows differ, of nobody where these are not known."""
        note = clip(str(error))
        parties = error.parties if isinstance(error, RowsDiffer) else ()
        new = [each for each in parties if each not in self._apart]
        if not parties or len(self._apart) + len(new) > _MAX_APART:
            self.part(note)
            return
        if not new:
            return  # that was run before it was known
        _log.warning("requests of %d parties are not run together with others any more: %s", len(new), note)
        self._apart = {**self._apart, **dict.fromkeys(new, note)}
        self._answer((Unequal(note, tuple(new)), ()))

    def _part(self, parts: Sequence[Asked], error: NotTogether) -> int:
        if len(parts) == 1:
            return self._fail(parts[0][0], InvalidArgument(str(error)), leaving=False)
        self._learn_difference(error)
        return self._one_by_one(parts)

    def _refused(self, parts: Sequence[Asked], error: RequestError) -> int:
        if not self._survives(error):
            return self._fail(parts[0][0], error, leaving=True)
        if len(parts) == 1:
            return self._fail(parts[0][0], error, leaving=False)
        return self._one_by_one(parts)

    def _one_by_one(self, parts: Sequence[Asked]) -> int:
        for order, frames in parts:
            status = self.together([(order, frames)]) if self._sizes else self.predict(order, frames)
            if status != exits.OK:
                return status
        return exits.OK

    def _joint(self, parts: Sequence[Asked], rows: int) -> Joint:
        # The same description is the same object, for as long as something has it.
        key = (rows, *[id(order.description) for order, _ in parts])
        joint = self._joints.get(key)
        if joint is None:
            joint = Joint([order.description for order, _ in parts], rows, self._sizes)
            if len(parts) <= _MAX_JOINT_PARTS:
                if len(self._joints) == _MAX_JOINTS:
                    self._joints.pop(next(iter(self._joints)))
                self._joints[key] = joint
        return joint

    def _learned(self, joint: Joint, inputs: Arrays, outputs: Arrays, form: Tuple[Any, ...]) -> Arrays:
        """What is divided of the engine's answer; how it is, is remembered."""
        if self.proof is not None:
            outputs = self.proof.checked(inputs, outputs)
        arrays = _sendable(outputs)
        joint.learn(arrays)
        joint.form = form if all(arrays[name] is outputs[name] for name in outputs) else ()
        return arrays

    def _bytes_of(self, order: Predict, frames: Sequence[Any]) -> Sequence[Any]:
        """Return the bytes of the inputs of a request; those in regions are copied."""
        if order.regions is None:
            return frames
        sizes, left = order.description.sizes, iter(frames)
        copies = {
            place.tensor: self.regions.read(place.region, place.offset, sizes[place.tensor])
            for place in order.regions.inputs
        }
        return [copies[index] if index in copies else next(left) for index in range(len(sizes))]

    def _inputs_of(self, order: Predict, frames: Sequence[Any]) -> Arrays:
        regions = order.regions
        return (
            _inputs(order.description.inputs, frames)
            if regions is None
            else self._mapped_inputs(order, regions, frames)
        )

    def _mapped_inputs(self, order: Predict, regions: MappedRegions, frames: Sequence[bytes]) -> Arrays:
        """The inputs of a request of which some are in regions."""
        specs, sizes = order.description.inputs, order.description.sizes
        inputs: Arrays = {}
        for place in regions.inputs:
            spec = specs[place.tensor]
            copy = self.regions.read(place.region, place.offset, sizes[place.tensor])
            inputs[spec.name] = from_frame(spec, copy)
        if frames:
            inputs.update(_inputs([spec for spec in specs if spec.name not in inputs], frames))
        return inputs

    def _placed(self, regions: MappedRegions, frames: List[Any]) -> Tuple[Optional[Tuple[int, ...]], List[Any]]:
        """Write outputs where there is room for them; return their positions, and the frames of the others."""
        placed: List[int] = []
        for room in regions.outputs:
            index = room.tensor
            if index < len(frames) and self.regions.write(frames[index], room.region, room.offset, room.bytes):
                placed.append(index)
        if not placed:
            return None, frames
        if len(placed) == len(frames):
            return tuple(placed), []
        return tuple(placed), [frame for index, frame in enumerate(frames) if index not in placed]

    def _survives(self, error: RequestError) -> bool:
        """Return whether the model answers as before after a refused predict, as far as can be seen."""
        if isinstance(error, Spoilt):
            return False
        return isinstance(error, NotRun) or self.proof is None or not self.proof.refuted()

    def _fail_unforeseen(self, order: Predict, error: Exception) -> int:
        _log.exception("request %d", order.request)
        return self._fail(order, Internal(f"{type(error).__name__}: {error}"), leaving=True)

    def _fail(self, order: Predict, error: RequestError, *, leaving: bool) -> int:
        if isinstance(error, Doubtful):
            # The one who is to blame is told of. This one is run again, where the daemon has it next.
            return exits.SPOILT
        self._answer((Failed(order.request, error.code, clip(str(error)), leaving), ()))
        return exits.SPOILT if leaving else exits.OK


def _inputs(specs: Sequence[TensorSpec], frames: Sequence[bytes]) -> Arrays:
    """The received tensors as an engine wants them: the frames are native and in C order already."""
    inputs: Arrays = {}
    for spec, frame in zip(specs, frames):
        array = from_frame(spec, frame)
        inputs[spec.name] = array if array.flags.aligned else array.copy()
    return inputs


def _sendable(outputs: Arrays) -> Arrays:
    """What the wire cannot carry is this request's error: it chose the sizes. A frame too long costs the connection."""
    arrays: Arrays = {}
    for name, array in outputs.items():
        try:
            arrays[name] = to_wire(array)
        except InvalidArgument as error:
            raise InvalidArgument(f"output {name} of shape {list(array.shape)} cannot be sent: {error}") from None
    return arrays
