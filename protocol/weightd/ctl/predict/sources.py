"""What `--input` names: files of several kinds, and which inputs of the model they are."""

from __future__ import annotations

import argparse
from typing import Any, BinaryIO, Callable, Iterator, NamedTuple, Optional, Sequence, Tuple, Type

from weightd.ctl import arrays, exits
from weightd.ctl.measuring.shapes import told
from weightd.ctl.predict import images, numbers
from weightd.ctl.predict.images import Pixels, WrongImage
from weightd.ctl.predict.numbers import Table, WrongNumbers
from weightd.ctl.text import clean
from weightd.ctl.verb import BadInput, Ended
from weightd.protocol.messages.data import TensorSignature

# As Python it takes thirty times as much memory; and nobody writes more by hand.
_MOST_TEXT_BYTES = 64 * 2**20

_START_BYTES = 16

# As in the schema.
_MAP: Type[Any] = dict

# How a number begins.
_NUMBERS = tuple(bytes([each]) for each in b"+-.0123456789")

Arrays = Iterator[Tuple[str, Any]]


class Unclear(Ended):
    """The command line does not say which input is meant."""

    status = exits.USAGE


class Given(NamedTuple):
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
    def told(self) -> str:
        """How the file is called."""
        return "stdin" if self.path == arrays.STDIN else self.path


def given(argument: str) -> Given:
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
    return Given(name, f"{stem}.npz", array) if mark and array and name else Given(name, path)


class Reader:
    """Reads what is given.

    Args:
        model: its name.
        ask: called when it has to be known; returns what the model takes.
        pixels: what becomes of those of pictures.
    """

    def __init__(self, model: str, ask: Callable[[], Sequence[TensorSignature]], pixels: Pixels) -> None:
        self._model = model
        self._ask = ask
        self._pixels = pixels
        self._inputs: Optional[Sequence[TensorSignature]] = None

    @property
    def inputs(self) -> Sequence[TensorSignature]:
        """What the model takes."""
        if self._inputs is None:
            self._inputs = self._ask()
        return self._inputs

    def read(self, given: Given) -> Arrays:
        """Yield names of inputs with their arrays.

        Raises:
            BadInput: the file cannot be used.
            Unclear: it is not said which input it is.
        """
        with arrays.opened(given.path) as file:
            try:
                start = file.read(_START_BYTES)
                file.seek(0)
                yield from self._arrays(given, start, file)
            except (WrongNumbers, WrongImage) as error:
                raise BadInput(f"{given.told}: {clean(str(error))}") from None
            except OSError as error:
                raise BadInput(f"{given.told}: {error.strerror or error}") from None

    def _arrays(self, given: Given, start: bytes, file: BinaryIO) -> Arrays:
        if start[: len(arrays.NPZ[0])] in arrays.NPZ:
            if given.name:
                yield given.name, arrays.load_one(given.told, file, given.array or given.name)
            else:
                yield from arrays.load_several(given.told, file).items()
        elif images.is_image(start):
            signature = self._signature(given)
            yield signature.name, images.load(file, signature, self._pixels)
        elif _is_json(given, start):
            yield from self._of_json(given, numbers.read_json(_text(given, file)))
        elif _is_csv(given, start):
            table = Table(_text(given, file))
            signature = self._signature(given)
            yield signature.name, numbers.of_table(table, signature)
        else:
            array = arrays.load(given.told, file)
            yield given.name or self._signature(given).name, array

    def _of_json(self, given: Given, value: Any) -> Arrays:
        if type(value) is not _MAP:
            signature = self._signature(given)
            yield signature.name, numbers.of_lists(value, signature)
            return
        if given.name:
            raise WrongNumbers("expected a list or a number, got an object; FILE alone takes inputs by their names")
        for name, each in value.items():
            try:
                yield name, numbers.of_lists(each, self._named(name))
            except WrongNumbers as error:
                raise WrongNumbers(f"{name}: {error}") from None

    def _signature(self, given: Given) -> TensorSignature:
        if given.name:
            return self._named(given.name)
        if len(self.inputs) != 1:
            raise Unclear(
                f"{given.told}: {self._model} takes {len(self.inputs)} inputs: expected NAME={given.path}; there are: "
                f"{told(self.inputs)}"
            )
        return self.inputs[0]

    def _named(self, name: str) -> TensorSignature:
        for each in self.inputs:
            if each.name == name:
                return each
        raise Unclear(f"{self._model} has no input {name!r}; there are: {told(self.inputs)}")


def _is_json(given: Given, start: bytes) -> bool:
    return given.path.endswith(".json") or (given.path == arrays.STDIN and start.lstrip()[:1] in (b"[", b"{"))


def _is_csv(given: Given, start: bytes) -> bool:
    return given.path.endswith(".csv") or (given.path == arrays.STDIN and start.lstrip()[:1] in _NUMBERS)


def _text(given: Given, file: BinaryIO) -> str:
    content = file.read(_MOST_TEXT_BYTES + 1)
    if len(content) > _MOST_TEXT_BYTES:
        raise BadInput(
            f"{given.told}: expected text of at most {_MOST_TEXT_BYTES:,} bytes; .npy files take more, and are quicker"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(f"{given.told}: expected numbers as text (UTF-8)") from None
