"""The kit of tests with the real MindSpore: `slices`, exported once for all of them, and `testkit.ranks.Group`.

`slices` is a `testkit.ranks.Slices`: two ranks of the network of docs/ranks.md, x FP32 [N, 16] -> output_0 FP32 [N, 8],
`selftest.npz` beside them. `testkit.ranks.inputs` makes questions. A group that is called directly, to compare with, is
`with Group(slices.paths, plain=True) as bare: bare.ask("predict", inputs(4))`: an answer of each rank. Of a model that
weightd serves, `python` is what runs it.

Where the environment is missing all of them are skipped; under CI=true they fail.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testkit import ranks


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter that has MindSpore."""
    found = ranks.interpreter()
    if found is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(ranks.HOW_TO_GET_IT)
    return found


@pytest.fixture(scope="session")
def slices(python: Path, tmp_path_factory: pytest.TempPathFactory) -> ranks.Slices:
    """The slices, once for all tests. Not to be changed: copy what is to be another."""
    del python
    return ranks.export(tmp_path_factory.mktemp("slices"))
