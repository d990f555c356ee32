"""What `--input` names: files of several kinds, and which inputs of the model they are."""

from __future__ import annotations

import argparse
from typing import Any, BinaryIO, Callable, Iterator, NamedTuple, Optional, Sequence, Tuple, Type

from weightctl import arrays, exit_codes
from weightctl.command import BadInput, CommandError
from weightctl.measuring.shapes import describe
from weightctl.predict import images, numbers
from weightctl.predict.images import Pixels, WrongImage
from weightctl.predict.numbers import CsvTable, WrongNumbers
from weightctl.text import clean
from weightd_protocol.messages.inference import TensorSignature

# As Python it takes thirty times as much memory; and nobody writes more by hand.
_MAX_TEXT_BYTES = 64 * 2**20

_START_BYTES = 16

# As in the schema.
_MAP: Type[Any] = dict

# How a number begins.
_NUMBER_STARTS = tuple(bytes([each]) for each in b"+-.0123456789")

Arrays = Iterator[Tuple[str, Any]]


class AmbiguousInput(CommandError):
    """The command line does not say which input is meant."""

    status = exit_codes.USAGE


class InputArgument(NamedTuple):
    """An argument.

    Attributes:
        name: of the input, "" where it has none.
        path: of the file, "-" for stdin.
        array: which one of an .npz, "" for that of the input's name.
    """

    name: str
    path: str
    array: str = ""

    @property
    def display_name(self) -> str:
        """How the file is called."""
        return "stdin" if self.path == arrays.STDIN else self.path


def parse_input_argument(argument: str) -> InputArgument:
    """Return what an argument names.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    name, equals, path = argument.partition("=")
    if not equals:
        name, path = "", argument
    if not path or (equals and not name):
        raise argparse.ArgumentTypeError(f"expected NAME=FILE, or FILE where the model has one input, got {argument!r}")
    stem, mark, array = path.partition(".npz:")
    return InputArgument(name, f"{stem}.npz", array) if mark and array and name else InputArgument(name, path)


class ArgumentReader:
    """Reads what is given.

    Args:
        model: its name.
        fetch_inputs: called when it has to be known; returns what the model takes.
        pixels: what becomes of those of pictures.
    """

    def __init__(self, model: str, fetch_inputs: Callable[[], Sequence[TensorSignature]], pixels: Pixels) -> None:
        self._model = model
        self._fetch_inputs = fetch_inputs
        self._pixels = pixels
        self._inputs: Optional[Sequence[TensorSignature]] = None

    @property
    def inputs(self) -> Sequence[TensorSignature]:
        """What the model takes."""
        if self._inputs is None:
            self._inputs = self._fetch_inputs()
        return self._inputs

    def read(self, argument: InputArgument) -> Arrays:
        """Yield names of inputs with their arrays.

        Raises:
            BadInput: the file cannot be used.
            AmbiguousInput: it is not said which input it is.
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
        elif images.is_image(start):
            signature = self._input_of(argument)
            yield signature.name, images.load(file, signature, self._pixels)
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
            raise WrongNumbers("expected a list or a number, got an object; FILE alone takes inputs by their names")
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
        raise BadInput(f"{argument.display_name}: expected numbers as text (UTF-8)") from None
