"""Whether a worker still answers rightly: what it gives is held against its signature, and itself against its canary.

A model that was spoilt answers with what is left of an earlier request, in silence. What shows is a failed predict, an
output of another size than the request's, or the canary's answer.
"""

from __future__ import annotations

import logging
from typing import Dict, Mapping, Optional, Sequence

from weightd.protocol.errors import RequestError
from weightd.protocol.messages.data import TensorSignature
from weightd.protocol.tensors import NUMPY_DTYPE
from weightd.worker.canary import canary
from weightd.worker.engines.engine import Arrays, Engine
from weightd.worker.engines.errors import Spoilt

_log = logging.getLogger("weightd.worker")


class Proof:
    """What is known of a worker's right answers.

    Args:
        engine: built and attached.
        known: the canary's answers then; its digest is "" where the model does not repeat itself.
        sample: what the canary asks, if it is not made up.
        tolerance: how far its answers may be apart (`canary.difference`).
    """

    def __init__(
        self, engine: Engine, known: canary.Canary, sample: Optional[Arrays] = None, tolerance: float = 0.0
    ) -> None:
        self._engine = engine
        self._known = known if tolerance else known._replace(answers=())
        self._sample = sample
        self._tolerance = tolerance
        signature = canary.observed(engine.signature, known)
        self._outputs: Dict[str, TensorSignature] = {each.name: each for each in signature.outputs}
        self._only_batch_is_free = all(
            each.shape is not None and all(dim >= 0 for dim in each.shape[1:]) for each in signature.inputs
        )
        self._batched = {each.name for each in signature.inputs if (each.shape or ())[:1] == (-1,)}
        self._shapes = known.shapes
        self._follow_batch = {name for name in self._outputs if self._follows(name)}
        # Without a canary the first request is the first predict: nothing can have spoilt the model before it.
        self._untouched = not known.cases

    def digest(self) -> str:
        """Return the digest of the canary's answers now, the known one if they are near enough; "" without a canary.

        Raises:
            InvalidArgument: the engine refuses the canary.
            Spoilt: it fails with it.
        """
        now = self._run()
        return self._known.digest if self._is_known(now) else now.digest

    def refuted(self) -> bool:
        """Return whether the canary shows that the model is not what it was; where there is none, nothing does."""
        if not self._known.cases:
            return False
        try:
            now = self._run()
        except RequestError:
            return True
        # Of a model that does not repeat itself the form of the answers is known.
        return not self._is_known(now) if self._known.digest else now.shapes != self._shapes

    def checked(self, inputs: Arrays, outputs: Arrays) -> Arrays:
        """Return the outputs if they can be relied on: then all that are of their form, for inputs of the same form.

        What contradicts the signature may be the model's way with this input: a signature is not always true. Then the
        canary's answer is right, and the model gives the same again. Without a canary that is believed of an engine
        whose models cannot be spoilt, and of the first predict of all, which finds the model as it was built. A
        signature that was once found untrue is never looked at again.

        Raises:
            Spoilt: they contradict the signature, and nothing shows that it is not the model that is wrong.
        """
        if self._engine.grew:
            outputs = self._after_growth(inputs, outputs)
        contradiction = self._contradiction(inputs, outputs)
        untouched, self._untouched = self._untouched, False
        if not contradiction:
            return outputs
        if self._known.cases:
            is_its_way = not self.refuted() and self._is_same(self._engine.predict(inputs), outputs)
        else:
            is_its_way = untouched or not self._engine.spoils
        if not is_its_way:
            unproven = "" if self._known.cases else "; it has no canary by which that could be looked into"
            raise Spoilt(f"the answer contradicts the model's signature: {contradiction}{unproven}")
        _log.warning(
            "the model's signature is not true, and is not held against its answers any more: %s", contradiction
        )
        self._outputs.clear()
        return outputs

    def _after_growth(self, inputs: Arrays, outputs: Arrays) -> Arrays:
        """Return the outputs if the self-test still has its known answers on a model that was built for larger shapes.

        Where it has not, the engine builds a new model at each change of shape from now on, and computes them again.

        Raises:
            Spoilt: even then the known answers do not come.
        """
        self._engine.grew = False
        if not self.refuted():
            return outputs
        _log.warning("answers depend on the shapes computed before: the model is built again at each change of shape")
        self._engine.by_shape = True
        if self.refuted():
            raise Spoilt("after it was built again for a larger shape, the model no longer gives the known answers")
        return self._engine.predict(inputs)

    def _contradiction(self, inputs: Arrays, outputs: Arrays) -> str:
        if not self._outputs:
            return ""
        if outputs.keys() != self._outputs.keys():
            return f"outputs {', '.join(outputs)}, expected {', '.join(self._outputs)}"
        batch = self._batch({name: array.shape for name, array in inputs.items()})
        for name, array in outputs.items():
            expected = self._outputs[name]
            if array.dtype.str != NUMPY_DTYPE[expected.datatype]:
                return f"output {name} is {array.dtype}, expected {expected.datatype}"
            if not _fits(expected, array.shape):
                return f"output {name} has shape {list(array.shape)}, expected {expected.shape_text}"
            if batch is not None and name in self._follow_batch and array.shape[0] != batch:
                return f"output {name} has shape {list(array.shape)} for a batch of {batch}"
        return ""

    def _batch(self, shapes: Mapping[str, Sequence[int]]) -> Optional[int]:
        """The size of the batch in inputs of these shapes, if it is clear what that is."""
        sizes = {shapes[name][0] for name in self._batched}
        return sizes.pop() if self._only_batch_is_free and len(sizes) == 1 else None

    def _follows(self, name: str) -> bool:
        """Whether the output's first dimension was that of the canary's inputs, each time."""
        batches = [self._batch(case) for case in self._known.cases]
        return len(set(batches)) > 1 and all(
            shapes.get(name, ())[:1] == (batch,) for batch, shapes in zip(batches, self._shapes)
        )

    def _run(self) -> canary.Canary:
        return canary.run(self._engine, self._known.cases, self._sample)

    def _is_known(self, now: canary.Canary) -> bool:
        return self._is_near(self._known, now)

    def _is_same(self, one: Arrays, other: Arrays) -> bool:
        """Whether two answers to one request are as equal as this model's are."""
        first, second = canary.of(({},), [one]), canary.of(({},), [other])
        return self._is_near(first, second) if self._known.digest else first.shapes == second.shapes

    def _is_near(self, one: canary.Canary, other: canary.Canary) -> bool:
        if not self._tolerance:
            return one.digest == other.digest
        return canary.difference(one, other) <= self._tolerance


def _fits(expected: TensorSignature, shape: Sequence[int]) -> bool:
    if expected.shape is None:
        return True
    return len(shape) == len(expected.shape) and all(wanted in (dim, -1) for dim, wanted in zip(shape, expected.shape))
