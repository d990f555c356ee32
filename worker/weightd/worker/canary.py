"""An input with a known answer: a worker that does not give the holder's answer never serves.

The inputs are made from the signature alone, so every process makes the same. Free dimensions are set to 1, then to 2:
two sizes also show that the model can be resized, and which dimensions of the outputs are free. Inputs that may have
any rank all have the same.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

from weightd.protocol.errors import InvalidArgument
from weightd.protocol.messages import TensorSignature
from weightd.protocol.tensors import NUMPY_DTYPE
from weightd.worker.engines.base import Arrays, Engine, Signature, Spoilt

Sizes = Tuple[int, ...]

_SEED = 20_260_101
# Which of these a model can run is found out by the holder. Some refuse both (small images, say): they have no canary.
_CANDIDATES: Sequence[Sizes] = ((1, 2), (1,))
# A batch of rows, of images, of sequences; then what is left.
_RANKS = (2, 4, 3, 1, 0)


class Canary(NamedTuple):
    """The sizes it was run with, the digest of the answers, and the shapes of the outputs for each size.

    No sizes: the model did not run on any. No digest: the model does not repeat its own answer. `rank` is that of the
    inputs that may have any.
    """

    sizes: Sizes
    digest: str
    shapes: List[Dict[str, Tuple[int, ...]]]
    rank: int = 0

    @property
    def note(self) -> str:
        """What an operator should know about it."""
        if not self.sizes:
            return "no canary: the model does not run on an input made from its signature"
        return "" if self.digest else "no canary: the model gives different answers to the same input"


def find(engine: Engine, rebuild: Callable[[], None]) -> Canary:
    """Return the canary of the model that `engine` has built; `rebuild` is called where the search has spoilt it.

    An engine that cannot be rebuilt stays spoilt, with a model that has no canary: it may share its weights, which no
    predict changes, but must not predict.
    """
    shapes = [each.shape for each in engine.signature.inputs]
    ranks = _RANKS if None in shapes else (0,)
    fixed = all(shape is not None and all(dim >= 0 for dim in shape) for shape in shapes)
    # Where the first failure is the last, only what nearly every model takes is tried.
    all_sizes = _CANDIDATES if engine.can_rebuild and not fixed else ((1,),)
    for rank, sizes in itertools.product(ranks, all_sizes):
        try:
            first = run(engine, sizes, rank)
            again = run(engine, sizes, rank)
        except InvalidArgument:
            continue
        except Spoilt:
            if not engine.can_rebuild:
                break
            rebuild()
            continue
        return first if first.digest == again.digest else first._replace(digest="")
    return Canary((), "", [])


def run(engine: Engine, sizes: Sizes, rank: int = 0) -> Canary:
    """Return the canary with the answers that `engine` gives now.

    Raises:
        InvalidArgument: the engine refuses the inputs.
        Spoilt: the predict failed.
    """
    state = hashlib.sha256()
    shapes: List[Dict[str, Tuple[int, ...]]] = []
    for size in sizes:
        outputs = engine.predict(_inputs(engine.signature, size, rank))
        for name, array in outputs.items():
            state.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            state.update(array.tobytes())
        shapes.append({name: tuple(array.shape) for name, array in outputs.items()})
    return Canary(sizes, state.hexdigest() if sizes else "", shapes, rank)


def observed(signature: Signature, canary: Canary) -> Signature:
    """Return `signature` with the shapes of outputs that the engine did not know, as the canary showed them.

    Where an input may have any rank, the canary shows only one of them: then so may an output.
    """
    if any(each.shape is None for each in signature.inputs):
        return signature
    return signature._replace(outputs=tuple(_observed_output(each, canary.shapes) for each in signature.outputs))


def _observed_output(output: TensorSignature, shapes: List[Dict[str, Tuple[int, ...]]]) -> TensorSignature:
    seen = [each[output.name] for each in shapes if output.name in each]
    if len({len(shape) for shape in seen}) != 1:
        return output
    if output.shape is not None and len(seen[0]) == len(output.shape):
        # Of a free dimension an engine may tell how large it can be.
        dims = tuple(dim if {dim}.issuperset(each) else -1 for dim, *each in zip(output.shape, *seen))
        return TensorSignature(output.name, output.datatype, dims)
    dims = tuple(each[0] if len(set(each)) == 1 and len(seen) > 1 else -1 for each in zip(*seen))
    return TensorSignature(output.name, output.datatype, dims)


def _inputs(signature: Signature, size: int, rank: int) -> Arrays:
    return {each.name: _array(each, size, rank) for each in signature.inputs}


def _array(tensor: TensorSignature, size: int, rank: int) -> Any:
    # RandomState is the generator whose stream numpy promises never to change. Inputs differ, or a swap would not show.
    random = np.random.RandomState([_SEED, *tensor.name.encode()])
    dims = (-1,) * rank if tensor.shape is None else tensor.shape
    shape = tuple(size if dim < 0 else dim for dim in dims)
    dtype = np.dtype(NUMPY_DTYPE[tensor.datatype])
    if dtype.kind == "f":
        return np.asarray(random.uniform(-1.0, 1.0, shape), dtype=dtype)
    # 0 and 1 are indices that every embedding has.
    return np.asarray(random.randint(0, 2, shape), dtype=dtype)
