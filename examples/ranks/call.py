"""Sends a request to the model and compares the answer with the answer of the whole network."""

from __future__ import annotations

import argparse

import numpy as np

from weightd import Client


def main() -> None:
    """Print the largest difference from the correct answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("selftest", help="selftest.npz, as export.py has written it")
    parser.add_argument("--socket", default="/run/weightd/weightd.sock")
    options = parser.parse_args()

    with np.load(options.selftest) as selftest, Client(options.socket) as client:
        outputs = client.infer("mlp", {"x": selftest["x"]})
        print(f"off by {np.abs(outputs['output_0'] - selftest['output_0']).max():.1e}")


if __name__ == "__main__":
    main()
