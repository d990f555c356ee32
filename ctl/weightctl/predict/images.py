"""A picture, as the input of a classifier: of the input's size and layout. Pillow reads it, where that is installed."""

from __future__ import annotations

import warnings
from typing import Any, BinaryIO, NamedTuple, Optional, Tuple

import numpy as np

from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.tensors import NUMPY_DTYPE

# How files begin that are tried: what else Pillow knows is seldom meant, and much of it old code.
_MAGIC = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"BM", b"GIF8", b"II*\0", b"MM\0*")
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")

# A photograph of 64 megapixels takes 256 MB while it is read: a larger one is no input of a model.
_MAX_PIXELS = 64 * 10**6

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


class WrongImage(ValueError):
    """A picture, or the input, is not what is expected."""


class Pixels(NamedTuple):
    """What becomes of values from 0 to 255: (value * scale - mean) / std.

    Attributes:
        scale: None for 1/255 where the input takes floats, and 1 where it takes UINT8.
        mean: one for all channels, or one for each.
        std: likewise.
    """

    scale: Optional[float] = None
    mean: Tuple[float, ...] = ()
    std: Tuple[float, ...] = ()


class ImageLayout(NamedTuple):
    """How an input has pictures.

    Attributes:
        channels: of each pixel.
        size: width and height, None where that is free.
        is_channels_last: whether the channels are the last dimension.
        has_batch: whether there is one for several pictures.
    """

    channels: int
    size: Tuple[Optional[int], Optional[int]]
    is_channels_last: bool
    has_batch: bool


def is_image(start: bytes) -> bool:
    """Return whether a file that begins so is a picture."""
    return start.startswith(_MAGIC) or (start[:4] == b"RIFF" and start[8:12] == b"WEBP")


def parse_layout(signature: TensorSignature) -> ImageLayout:
    """Return how an input has pictures: [N, C, H, W] or [N, H, W, C], C 1, 3 or 4, with or without N.

    Raises:
        WrongImage: it has none, or nobody can tell.
    """
    shape: Tuple[int, ...] = signature.shape or ()
    has_batch = len(shape) == 4
    dims = shape[1:] if has_batch else shape
    is_first, is_last = (len(dims) == 3 and dims[index] in _MODES for index in (0, -1))
    if is_first == is_last or (has_batch and shape[0] not in (-1, 1)):
        raise WrongImage(
            f"it is a picture, and the input is {signature.shape_text}: expected [1, C, H, W] or [1, H, W, C], C 1, 3"
            " or 4"
        )
    channels, height, width = (dims[each] for each in ((2, 0, 1) if is_last else (0, 1, 2)))
    return ImageLayout(channels, (_fixed_dim(width), _fixed_dim(height)), is_last, has_batch)


def _fixed_dim(dim: int) -> Optional[int]:
    return None if dim < 0 else dim


def load(file: BinaryIO, signature: TensorSignature, pixels: Pixels) -> Any:
    """Return a picture as the input takes it.

    Raises:
        WrongImage: it cannot be read, or the input takes no picture.
    """
    image_layout = parse_layout(signature)
    dtype = np.dtype(NUMPY_DTYPE[signature.datatype])
    if dtype.kind != "f" and (signature.datatype != "UINT8" or pixels != Pixels()):
        raise WrongImage(
            f"it is a picture, and the input is {signature.datatype}: expected floats, or UINT8 without --scale, "
            "--mean and --std"
        )
    values = _read_pixels(file, image_layout)
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            values = _scale(values, pixels).astype(dtype)
        if not np.isfinite(values).all():
            raise WrongImage(
                f"--scale, --mean, --std: expected numbers that {signature.datatype} has, got infinite ones"
            )
    values = values if image_layout.is_channels_last else np.moveaxis(values, -1, 0)
    return np.ascontiguousarray(values[np.newaxis] if image_layout.has_batch else values)


def _read_pixels(file: BinaryIO, image_layout: ImageLayout) -> Any:
    """Return height, width and channels of bytes."""
    try:
        from PIL import Image, ImageOps  # noqa: PLC0415 - few need it
    except ImportError:
        raise WrongImage("it is a picture, and Pillow is not installed: pip install 'weightd[images]'") from None
    try:
        # What Pillow warns of is of transparency, which is not asked for, and of sizes, which are looked at here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(file, formats=_FORMATS) as image:
                _check_size("a picture", image.width, image.height)
                if image.mode.startswith(("I", "F")):
                    # Pillow would make 255 of all that is more.
                    raise WrongImage(f"expected 8 bits a channel, got a picture of mode {image.mode}; .npy has others")
                upright = ImageOps.exif_transpose(image)
                size = image_layout.size[0] or upright.width, image_layout.size[1] or upright.height
                _check_size("an input", *size)
                picture = upright.convert(_MODES[image_layout.channels]).resize(size, Image.Resampling.BILINEAR)
    except WrongImage:
        raise
    except Exception as error:  # noqa: BLE001 - what reads foreign formats raises whatever it meets
        raise WrongImage(f"the picture is damaged, or of a kind that cannot be read: {error}") from None
    return np.asarray(picture).reshape(size[1], size[0], image_layout.channels)


def _check_size(what: str, width: int, height: int) -> None:
    if width * height > _MAX_PIXELS:
        raise WrongImage(f"expected {what} of at most {_MAX_PIXELS:,} pixels, got {width:,} x {height:,}")


def _scale(values: Any, pixels: Pixels) -> Any:
    channels = values.shape[-1]
    for name, each in (("--mean", pixels.mean), ("--std", pixels.std)):
        if len(each) not in (0, 1, channels):
            raise WrongImage(f"{name}: expected 1 number or {channels}, one for each channel, got {len(each)}")
    scale = 1 / 255 if pixels.scale is None else pixels.scale
    mean, std = (np.array(each or [without], np.float32) for each, without in ((pixels.mean, 0), (pixels.std, 1)))
    return (values * np.float32(scale) - mean) / std
