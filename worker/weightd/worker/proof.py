"""Whether a worker still answers rightly: what it gives is held against its signature, and itself against its canary.

A model that was spoilt answers with what is left of an earlier request, in silence. What shows is a failed predict, an
output of another size than the request's, or the canary's answer.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

from weightd.protocol.errors import RequestError
from weightd.protocol.messages import TensorSignature
from weightd.protocol.tensors import NUMPY_DTYPE
from weightd.worker import canary
from weightd.worker.engines.base import Arrays, Engine, Spoilt


class Proof:
    """What is known of a worker's right answers.

    Args:
        engine: built and attached.
        known: the canary's answers then; its digest is "" where the model does not repeat itself.
    """

    def __init__(self, engine: Engine, known: canary.Canary) -> None:
        self._engine = engine
        self._known = known
        signature = canary.observed(engine.signature, known)
        self._outputs: Dict[str, TensorSignature] = {each.name: each for each in signature.outputs}
        self._only_batch_is_free = all(
            each.shape is not None and all(dim >= 0 for dim in each.shape[1:]) for each in signature.inputs
        )
        self._batched = {each.name for each in signature.inputs if (each.shape or ())[:1] == (-1,)}
        # The last request and its answer that fit: the names of the outputs, then shape and dtype of each tensor.
        self._good: Optional[Tuple[Tuple[str, ...], List[Tuple[Any, Any]]]] = None
        self._follow_batch = {name for name in self._outputs if _follows(known, name)}

    def digest(self) -> str:
        """Return the digest of the canary's answers now; "" if there is no canary.

        Raises:
            InvalidArgument: the engine refuses the canary.
            Spoilt: it fails with it.
        """
        return canary.run(self._engine, self._known.sizes, self._known.rank).digest

    def holds(self) -> bool:
        """Return whether the canary gives what it gave; where there is none, nothing can be proved."""
        if not self._known.sizes:
            return False
        try:
            return self.digest() == self._known.digest or not self._known.digest
        except RequestError:
            return False

    def checked(self, inputs: Arrays, outputs: Arrays) -> Arrays:
        """Return the outputs if they can be relied on.

        What contradicts the signature may be the model's way with this input (a signature is not always true): then
        it gives the same again, the canary's answer is right, and the contradiction is never looked at again.

        Raises:
            Spoilt: they contradict the signature, and cannot be had a second time.
        """
        # Most requests are like the one before.
        form = tuple(outputs), [(array.shape, array.dtype) for array in (*inputs.values(), *outputs.values())]
        if form == self._good:
            return outputs
        contradiction = self._contradiction(inputs, outputs)
        if not contradiction:
            self._good = form
            return outputs
        if not self.holds() or not _equal(self._engine.predict(inputs), outputs):
            raise Spoilt(f"the answer contradicts the model's signature: {contradiction}")
        self._outputs.clear()
        return outputs

    def _contradiction(self, inputs: Arrays, outputs: Arrays) -> str:
        if not self._outputs:
            return ""
        if outputs.keys() != self._outputs.keys():
            return f"outputs {', '.join(outputs)}, expected {', '.join(self._outputs)}"
        batch = self._batch(inputs)
        for name, array in outputs.items():
            expected = self._outputs[name]
            if array.dtype.str != NUMPY_DTYPE[expected.datatype]:
                return f"output {name} is {array.dtype}, expected {expected.datatype}"
            if not _fits(expected, array.shape):
                return f"output {name} has shape {list(array.shape)}, expected {expected.form}"
            if batch is not None and name in self._follow_batch and array.shape[0] != batch:
                return f"output {name} has shape {list(array.shape)} for a batch of {batch}"
        return ""

    def _batch(self, inputs: Arrays) -> Optional[int]:
        """The size of the batch, if it is clear what that is."""
        sizes = {inputs[name].shape[0] for name in self._batched}
        return sizes.pop() if self._only_batch_is_free and len(sizes) == 1 else None


def _follows(known: canary.Canary, name: str) -> bool:
    """Whether the output's first dimension was that of the canary's inputs, each time."""
    if len(set(known.sizes)) < 2:
        return False
    return all(shapes.get(name, ())[:1] == (size,) for size, shapes in zip(known.sizes, known.shapes))


def _fits(expected: TensorSignature, shape: Sequence[int]) -> bool:
    if expected.shape is None:
        return True
    return len(shape) == len(expected.shape) and all(wanted in (dim, -1) for dim, wanted in zip(shape, expected.shape))


def _equal(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape and one[name].tobytes() == other[name].tobytes() for name in one
    )
