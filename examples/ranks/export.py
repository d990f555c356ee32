"""Exports a network of two layers, split by hand: a checkpoint of the whole network, and a MindIR file for each rank.

`python export.py DIRECTORY` writes whole.ckpt, rank0.mindir, rank1.mindir and selftest.npz there. It needs mindspore.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

INPUTS, OUTPUTS = 16, 8

# The backend's name for the group of all ranks. The file contains it, so it runs only on this backend.
WORLD = {"cpu": "mccl_world_group", "ascend": "hccl_world_group"}


class Whole(nn.Cell):
    """The trained network; here with random weights."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        draw = np.random.default_rng(0)
        first = draw.standard_normal((INPUTS, hidden)) / np.sqrt(INPUTS)
        second = draw.standard_normal((hidden, OUTPUTS)) / np.sqrt(hidden)
        self.first = Parameter(Tensor(first.astype(np.float32)), name="first")
        self.second = Parameter(Tensor(second.astype(np.float32)), name="second")
        self.matmul, self.relu = ops.MatMul(), ops.ReLU()

    def construct(self, x: Tensor) -> Tensor:
        """Compute both layers."""
        return self.matmul(self.relu(self.matmul(x, self.first)), self.second)


class Slice(nn.Cell):
    """The slice of one rank: columns of the first matrix and the same rows of the second. The sum is the answer."""

    def __init__(self, hidden: int, world: str) -> None:
        super().__init__()
        self.first = Parameter(Tensor(np.zeros((INPUTS, hidden), np.float32)), name="first")
        self.second = Parameter(Tensor(np.zeros((hidden, OUTPUTS), np.float32)), name="second")
        self.matmul, self.relu = ops.MatMul(), ops.ReLU()
        self.sum = ops.AllReduce(group=world)

    def construct(self, x: Tensor) -> Tensor:
        """Compute this rank's part of both layers and sum over all ranks."""
        return self.sum(self.matmul(self.relu(self.matmul(x, self.first)), self.second))


def export(directory: Path, ranks: int, hidden: int, backend: str) -> None:
    """Write the slices."""
    whole = ms.load_checkpoint(str(directory / "whole.ckpt"))
    first, second = whole["first"].asnumpy(), whole["second"].asnumpy()
    any_batch = Tensor(shape=[None, INPUTS], dtype=ms.float32)
    width = hidden // ranks
    for rank in range(ranks):
        mine = slice(rank * width, (rank + 1) * width)
        part = {"first": Parameter(Tensor(first[:, mine].copy())), "second": Parameter(Tensor(second[mine].copy()))}
        net = Slice(width, WORLD[backend])
        missing, unused = ms.load_param_into_net(net, part)
        if missing or unused:
            raise SystemExit(f"the slice of rank {rank} does not fit: {missing or unused}")
        ms.export(net, any_batch, file_name=str(directory / f"rank{rank}"), file_format="MINDIR")


def main() -> None:
    """Save the whole network, inputs with their outputs, and the slices."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--backend", choices=WORLD, default="cpu")
    options = parser.parse_args()
    if options.hidden % options.ranks:
        parser.error("--hidden: expected a multiple of --ranks")
    options.directory.mkdir(parents=True, exist_ok=True)
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")

    net = Whole(options.hidden)
    ms.save_checkpoint(net, str(options.directory / "whole.ckpt"))
    question = np.random.default_rng(1).standard_normal((4, INPUTS)).astype(np.float32)
    np.savez(options.directory / "selftest.npz", x=question, output_0=net(Tensor(question)).asnumpy())

    export(options.directory, options.ranks, options.hidden, options.backend)


if __name__ == "__main__":
    main()
