"""Tests of the conversion of images to a classifier's input."""

from __future__ import annotations

import io
import sys
from typing import Any, Tuple

import numpy as np
import pytest

from weightctl.predict.sources import ImageLayout, Pixels, WrongImage, is_image, load, parse_layout
from weightd_protocol.messages.inference import TensorSignature

# Red above blue, two pixels wide.
IMAGE = np.array([[[255, 0, 0], [255, 0, 0]], [[0, 0, 255], [0, 0, 255]]], np.uint8)


def signature(*shape: int, datatype: str = "FP32") -> TensorSignature:
    return TensorSignature("x", datatype, shape)


@pytest.mark.parametrize(
    ("shape", "form"),
    [
        ((1, 3, 8, 9), ImageLayout(3, (9, 8), is_channels_last=False, has_batch=True)),
        ((-1, 3, -1, -1), ImageLayout(3, (None, None), is_channels_last=False, has_batch=True)),
        ((-1, 8, 9, 3), ImageLayout(3, (9, 8), is_channels_last=True, has_batch=True)),
        ((1, 28, 28, 1), ImageLayout(1, (28, 28), is_channels_last=True, has_batch=True)),
        ((4, 8, 9), ImageLayout(4, (9, 8), is_channels_last=False, has_batch=False)),
    ],
)
def test_shape_determines_image_layout(shape: Tuple[int, ...], form: ImageLayout) -> None:
    assert parse_layout(signature(*shape)) == form


@pytest.mark.parametrize("shape", [(), (64,), (1, 64), (2, 3, 8, 8), (1, 2, 8, 8), (1, 3, 8, 3), (1, -1, 8, 8)])
def test_rejects_shape_without_unique_layout(shape: Tuple[int, ...]) -> None:
    with pytest.raises(WrongImage, match="expected \\[1, C, H, W\\] or"):
        parse_layout(signature(*shape))


def written(array: Any, kind: str = "PNG", **more: Any) -> io.BytesIO:
    file = io.BytesIO()
    pytest.importorskip("PIL.Image").fromarray(array).save(file, kind, **more)
    assert is_image(file.getvalue()[:16])
    file.seek(0)
    return file


def test_scales_and_arranges_image() -> None:
    first = load(written(IMAGE), signature(1, 3, 2, 2), Pixels())
    assert (first.dtype, first.flags.c_contiguous) == (np.float32, True)
    assert first.tolist() == [[[[1, 1], [0, 0]], [[0, 0], [0, 0]], [[0, 0], [1, 1]]]]
    last = load(written(IMAGE), signature(-1, -1, -1, 3, datatype="UINT8"), Pixels())
    assert np.array_equal(last, IMAGE[np.newaxis])
    half = load(written(IMAGE), signature(3, 2, 2, datatype="FP16"), Pixels(1.0, (255.0, 1.0, 0.0), (2.0,)))
    assert half[:, 0, 0].tolist() == [0, -0.5, 0]


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "TIFF", "JPEG", "WEBP"])
def test_resizes_each_kind_of_image(kind: str) -> None:
    plain = np.full((20, 40, 3), 200, np.uint8)
    there = load(written(plain, kind), signature(1, 8, 4, 1, datatype="UINT8"), Pixels())
    assert there.shape == (1, 8, 4, 1)
    assert abs(there.astype(int) - 200).max() < 4


def test_applies_exif_orientation() -> None:
    exif = pytest.importorskip("PIL.Image").Exif()
    exif[0x0112] = 3  # upside down
    there = load(written(IMAGE, exif=exif), signature(1, 2, 2, 3, datatype="UINT8"), Pixels())
    assert np.array_equal(there[0], IMAGE[::-1])


def test_rejects_unusable_image(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = io.BytesIO(written(IMAGE).getvalue()[:-30])
    with pytest.raises(WrongImage, match="cannot read the image"):
        load(cut, signature(1, 3, 2, 2), Pixels())
    with pytest.raises(WrongImage, match="cannot convert an image to INT64; expected floats, or UINT8"):
        load(written(IMAGE), signature(1, 3, 2, 2, datatype="INT64"), Pixels())
    with pytest.raises(WrongImage, match="UINT8 without --scale"):
        load(written(IMAGE), signature(1, 3, 2, 2, datatype="UINT8"), Pixels(scale=2.0))
    with pytest.raises(WrongImage, match="--mean: expected 1 or 3 numbers, one per channel, got 2"):
        load(written(IMAGE), signature(1, 3, 2, 2), Pixels(mean=(1.0, 2.0)))
    with pytest.raises(WrongImage, match="expected an image with 8 bits per channel, got mode I;16"):
        load(written(np.full((2, 2), 300, np.uint16)), signature(1, 1, 2, 2), Pixels())
    with pytest.raises(WrongImage, match="--scale, --mean, --std: expected results in the range of FP16"):
        load(written(IMAGE), signature(1, 3, 2, 2, datatype="FP16"), Pixels(scale=1000.0))
    with pytest.raises(WrongImage, match="expected an input of at most 64,000,000 pixels, got 99,999 x 99,999"):
        load(written(IMAGE), signature(1, 3, 99999, 99999), Pixels())
    monkeypatch.setattr("weightctl.predict.sources._MAX_PIXELS", 3)
    with pytest.raises(WrongImage, match="expected an image of at most 3 pixels, got 2 x 2"):
        load(written(IMAGE), signature(1, 3, 2, 2), Pixels())
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(WrongImage, match=r"Pillow is not installed: pip install '\./weightd\[images\]'"):
        load(io.BytesIO(b"\x89PNG\r\n"), signature(1, 3, 2, 2), Pixels())
