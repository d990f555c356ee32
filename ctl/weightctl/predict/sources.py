"""Reads the files of `--input`, including pictures, and assigns their arrays to the inputs of the model.

Reading pictures requires Pillow. A picture is converted to the size and layout of the input.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any, BinaryIO, Callable, Iterator, NamedTuple, Optional, Sequence, Tuple, Type

import numpy as np

from weightctl import arrays, exit_codes
from weightctl.command import BadInput, CommandError
from weightctl.predict import numbers
from weightctl.predict.numbers import CsvTable, WrongNumbers
from weightctl.request_inputs import describe
from weightctl.text import clean
from weightd_protocol.datatypes import NUMPY_DTYPE
from weightd_protocol.messages.inference import TensorSignature

# First bytes of files in the supported picture formats, except WebP. Other formats of Pillow are rare, and their
# decoders are often old code.
_MAGIC = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"BM", b"GIF8", b"II*\0", b"MM\0*")

_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")

# Maximum number of pixels of a picture. Decoding 64 megapixels takes 256 MB; no model is likely to take larger
# pictures.
_MAX_PIXELS = 64 * 10**6
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}

# Maximum size of a JSON or CSV text in bytes. The parsed text takes thirty times as much memory.
_MAX_TEXT_BYTES = 64 * 2**20
_START_BYTES = 16

# An alias of `dict`. With `isinstance(value, dict)`, type checkers would infer a map of unknown elements.
_MAP: Type[Any] = dict

# Characters with which a number, and so a CSV text on stdin, can begin.
_NUMBER_STARTS = tuple(bytes([each]) for each in b"+-.0123456789")

Arrays = Iterator[Tuple[str, Any]]


class WrongImage(ValueError):
    """A picture cannot be used, or the input does not accept pictures."""


class Pixels(NamedTuple):
    """How pixel values from 0 to 255 are normalized: (value * scale - mean) / std. UINT8 inputs are not normalized.

    Attributes:
        scale: the factor for all values; None for 1/255.
        mean: one value for all channels, or one value per channel; empty for 0.
        std: one value for all channels, or one value per channel; empty for 1.
    """

    scale: Optional[float] = None
    mean: Tuple[float, ...] = ()
    std: Tuple[float, ...] = ()


class ImageLayout(NamedTuple):
    """How an input represents a picture.

    Attributes:
        channels: the number of channels.
        size: width and height in pixels; None for a dimension that each request chooses.
        is_channels_last: whether the last dimension holds the channels.
        has_batch: whether the first dimension is the number of pictures.
    """

    channels: int
    size: Tuple[Optional[int], Optional[int]]
    is_channels_last: bool
    has_batch: bool


def is_image(start: bytes) -> bool:
    """Return whether a file that starts with these bytes is a picture in a supported format."""
    return start.startswith(_MAGIC) or (start[:4] == b"RIFF" and start[8:12] == b"WEBP")


def parse_layout(signature: TensorSignature) -> ImageLayout:
    """Return how an input represents a picture.

    The input's shape must be [N, C, H, W] or [N, H, W, C], with C = 1, 3 or 4, or such a shape without N.

    Raises:
        WrongImage: the input has another shape, or the shape matches both layouts.
    """
    shape: Tuple[int, ...] = signature.shape or ()
    has_batch = len(shape) == 4
    dims = shape[1:] if has_batch else shape
    is_first, is_last = (len(dims) == 3 and dims[index] in _MODES for index in (0, -1))
    if is_first == is_last or (has_batch and shape[0] not in (-1, 1)):
        raise WrongImage(
            f"cannot convert an image to {signature.shape_text}; expected [1, C, H, W] or [1, H, W, C], C 1, 3 or 4"
        )
    channels, height, width = (dims[each] for each in ((2, 0, 1) if is_last else (0, 1, 2)))
    return ImageLayout(channels, (_fixed_dim(width), _fixed_dim(height)), is_last, has_batch)


def load(file: BinaryIO, signature: TensorSignature, pixels: Pixels) -> Any:
    """Read a picture and convert it to an array for an input.

    Raises:
        WrongImage: the picture cannot be read, or the input does not accept pictures.
    """
    image_layout = parse_layout(signature)
    dtype = np.dtype(NUMPY_DTYPE[signature.datatype])
    if dtype.kind != "f" and (signature.datatype != "UINT8" or pixels != Pixels()):
        raise WrongImage(
            f"cannot convert an image to {signature.datatype}; expected floats, or UINT8 without --scale, "
            "--mean and --std"
        )
    values = _read_pixels(file, image_layout)
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            values = _scale(values, pixels).astype(dtype)
        if not np.isfinite(values).all():
            raise WrongImage(
                f"--scale, --mean, --std: expected results in the range of {signature.datatype}, got infinity"
            )
    values = values if image_layout.is_channels_last else np.moveaxis(values, -1, 0)
    return np.ascontiguousarray(values[np.newaxis] if image_layout.has_batch else values)


class AmbiguousInput(CommandError):
    """The command line does not say to which input of the model a file belongs."""

    status = exit_codes.USAGE


class InputArgument(NamedTuple):
    """A parsed `--input` argument.

    Attributes:
        name: the name of the input; "" if the argument gives no name.
        path: the path of the file; "-" for stdin.
        array: the name of the array in an .npz file; "" if it is the name of the input.
    """

    name: str
    path: str
    array: str = ""

    @property
    def display_name(self) -> str:
        """The name of the file in error messages."""
        return "stdin" if self.path == arrays.STDIN else self.path


def parse_input_argument(argument: str) -> InputArgument:
    """Parse an `--input` argument: FILE, NAME=FILE or NAME=FILE.npz:ARRAY.

    Raises:
        argparse.ArgumentTypeError: the argument is invalid.
    """
    name, equals, path = argument.partition("=")
    if not equals:
        name, path = "", argument
    if not path or (equals and not name):
        raise argparse.ArgumentTypeError(f"expected NAME=FILE, or FILE if the model has one input, got {argument!r}")
    stem, mark, array = path.partition(".npz:")
    return InputArgument(name, f"{stem}.npz", array) if mark and array and name else InputArgument(name, path)


class ArgumentReader:
    """Reads the files of `--input` arguments and assigns their arrays to inputs of the model.

    Args:
        model: the model's name.
        fetch_inputs: returns the inputs in the model's signature. It is called only if the signature is needed.
        pixels: how pixel values of pictures are normalized.
    """

    def __init__(self, model: str, fetch_inputs: Callable[[], Sequence[TensorSignature]], pixels: Pixels) -> None:
        self._model = model
        self._fetch_inputs = fetch_inputs
        self._pixels = pixels
        self._inputs: Optional[Sequence[TensorSignature]] = None

    @property
    def inputs(self) -> Sequence[TensorSignature]:
        """The inputs in the model's signature, fetched at the first access."""
        if self._inputs is None:
            self._inputs = self._fetch_inputs()
        return self._inputs

    def read(self, argument: InputArgument) -> Arrays:
        """Read the file of an argument. Yield the name of an input and the array for it, once per input in the file.

        Raises:
            BadInput: the file cannot be used as input.
            AmbiguousInput: the argument does not make clear to which input the file belongs.
        """
        with arrays.open_input(argument.path) as file:
            try:
                start = file.read(_START_BYTES)
                file.seek(0)
                yield from self._read_arrays(argument, start, file)
            except (WrongNumbers, WrongImage) as error:
                raise BadInput(f"{argument.display_name}: {clean(str(error))}") from None
            except OSError as error:
                raise BadInput(f"{argument.display_name}: {error.strerror or error}") from None

    def _read_arrays(self, argument: InputArgument, start: bytes, file: BinaryIO) -> Arrays:
        if start[: len(arrays.NPZ[0])] in arrays.NPZ:
            if argument.name:
                yield argument.name, arrays.load_one(argument.display_name, file, argument.array or argument.name)
            else:
                yield from arrays.load_all(argument.display_name, file).items()
        elif is_image(start):
            signature = self._input_of(argument)
            yield signature.name, load(file, signature, self._pixels)
        elif _is_json(argument, start):
            yield from self._json_arrays(argument, numbers.read_json(_read_text(argument, file)))
        elif _is_csv(argument, start):
            table = CsvTable(_read_text(argument, file))
            signature = self._input_of(argument)
            yield signature.name, numbers.array_of_table(table, signature)
        else:
            array = arrays.load(argument.display_name, file)
            yield argument.name or self._input_of(argument).name, array

    def _json_arrays(self, argument: InputArgument, value: Any) -> Arrays:
        if type(value) is not _MAP:
            signature = self._input_of(argument)
            yield signature.name, numbers.array_of_lists(value, signature)
            return
        if argument.name:
            raise WrongNumbers(
                "expected a list or a number, got an object; use FILE without NAME for an object with inputs by name"
            )
        for name, each in value.items():
            try:
                yield name, numbers.array_of_lists(each, self._input_named(name))
            except WrongNumbers as error:
                raise WrongNumbers(f"{name}: {error}") from None

    def _input_of(self, argument: InputArgument) -> TensorSignature:
        if argument.name:
            return self._input_named(argument.name)
        if len(self.inputs) != 1:
            raise AmbiguousInput(
                f"{argument.display_name}: {self._model} takes {len(self.inputs)} inputs: expected"
                f" NAME={argument.path}; there are: {describe(self.inputs)}"
            )
        return self.inputs[0]

    def _input_named(self, name: str) -> TensorSignature:
        for each in self.inputs:
            if each.name == name:
                return each
        raise AmbiguousInput(f"{self._model} has no input {name!r}; there are: {describe(self.inputs)}")


def _fixed_dim(dim: int) -> Optional[int]:
    return None if dim < 0 else dim


def _read_pixels(file: BinaryIO, image_layout: ImageLayout) -> Any:
    """Return the pixels of a picture as an array of bytes. Its dimensions are height, width and channels."""
    try:
        from PIL import Image, ImageOps  # noqa: PLC0415 - only needed for pictures
    except ImportError:
        raise WrongImage("cannot read images: Pillow is not installed: pip install './weightd[images]'") from None
    try:
        # Ignore Pillow's warnings about transparency, which does not matter here, and about large pictures, which
        # `_check_size` rejects.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(file, formats=_FORMATS) as image:
                _check_size("an image", image.width, image.height)
                if image.mode.startswith(("I", "F")):
                    # Pictures in these modes have larger values, and Pillow would convert all values above 255 to 255.
                    raise WrongImage(
                        f"expected an image with 8 bits per channel, got mode {image.mode}; use .npy for other data"
                    )
                upright = ImageOps.exif_transpose(image)
                size = image_layout.size[0] or upright.width, image_layout.size[1] or upright.height
                _check_size("an input", *size)
                picture = upright.convert(_MODES[image_layout.channels]).resize(size, Image.Resampling.BILINEAR)
    except WrongImage:
        raise
    except Exception as error:  # noqa: BLE001 - decoders may raise anything for malformed files
        raise WrongImage(f"cannot read the image: {error}") from None
    return np.asarray(picture).reshape(size[1], size[0], image_layout.channels)


def _check_size(what: str, width: int, height: int) -> None:
    if width * height > _MAX_PIXELS:
        raise WrongImage(f"expected {what} of at most {_MAX_PIXELS:,} pixels, got {width:,} x {height:,}")


def _scale(values: Any, pixels: Pixels) -> Any:
    channels = values.shape[-1]
    for name, each in (("--mean", pixels.mean), ("--std", pixels.std)):
        if len(each) not in (0, 1, channels):
            raise WrongImage(f"{name}: expected 1 or {channels} numbers, one per channel, got {len(each)}")
    scale = 1 / 255 if pixels.scale is None else pixels.scale
    mean, std = (np.array(each or [without], np.float32) for each, without in ((pixels.mean, 0), (pixels.std, 1)))
    return (values * np.float32(scale) - mean) / std


def _is_json(argument: InputArgument, start: bytes) -> bool:
    return argument.path.endswith(".json") or (argument.path == arrays.STDIN and start.lstrip()[:1] in (b"[", b"{"))


def _is_csv(argument: InputArgument, start: bytes) -> bool:
    return argument.path.endswith(".csv") or (argument.path == arrays.STDIN and start.lstrip()[:1] in _NUMBER_STARTS)


def _read_text(argument: InputArgument, file: BinaryIO) -> str:
    content = file.read(_MAX_TEXT_BYTES + 1)
    if len(content) > _MAX_TEXT_BYTES:
        raise BadInput(
            f"{argument.display_name}: expected text of at most {_MAX_TEXT_BYTES:,} bytes; .npy files take more, and"
            " are quicker"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(f"{argument.display_name}: expected numbers as UTF-8 text") from None
