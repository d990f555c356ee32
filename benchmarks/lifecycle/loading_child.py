"""Child process of `benchmarks.lifecycle.hot`: a client whose requests load one model after another.

    python loading_child.py ADDRESS INPUT MODEL...

It requests the models in turn with INPUT, an .npy file with the input x, and prints a line after each answer, until it
is killed.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np

from weightd import Client


def main() -> None:
    """Request the models until this process is killed."""
    address, path, *models = sys.argv[1:]
    inputs = {"x": np.load(path)}
    with Client(address) as client:
        for name in itertools.cycle(models):
            client.infer(name, inputs)
            print(name, flush=True)


if __name__ == "__main__":
    main()
