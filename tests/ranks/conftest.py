"""Fixtures of the tests with the real MindSpore.

`slices` is a `testkit.ranks.Slices`: two ranks of the network of docs/ranks.md, x FP32 [N, 16] -> output_0 FP32 [N, 8],
with `selftest.npz` beside them. `testkit.ranks.inputs` makes requests. `with Group(slices.paths, plain=True) as bare:
bare.ask("predict", inputs(4))` returns the answers of all ranks without weightd, for comparison. `python` is the
interpreter for models that weightd serves.

Without the environment, the tests are skipped; with CI=true they fail.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testkit import ranks


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter with MindSpore."""
    found = ranks.interpreter()
    if found is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(ranks.HOW_TO_GET_IT)
    return found


@pytest.fixture(scope="session")
def slices(python: Path, tmp_path_factory: pytest.TempPathFactory) -> ranks.Slices:
    """The slices, exported once for all tests; tests must not change them, only copies."""
    del python
    return ranks.export(tmp_path_factory.mktemp("slices"))
