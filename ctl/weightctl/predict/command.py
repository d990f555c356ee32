"""The command `weightctl predict`: its arguments, its sequence and its output."""

from __future__ import annotations

import argparse
import json
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from weightctl import arrays, exit_codes, request_inputs
from weightctl.command import Command, Connect
from weightctl.predict import numbers, sources
from weightctl.predict.numbers import Labels
from weightctl.predict.sources import ArgumentReader, Pixels
from weightctl.text import clean
from weightd.client import Client
from weightd_protocol.messages.inference import TensorSignature

_DESCRIPTION = """\
Runs a model once and shows its outputs: name, datatype, shape, and values (a part of large ones).

  weightctl predict resnet50 --random
  weightctl predict resnet50 --input cat.jpg --top 5 --labels names.txt
  weightctl predict bert --input ids=ids.npy --input mask=mask.json
  echo '[1, 2, 3, 4]' | weightctl predict tiny --input -

Formats of input files:

  .npy, .npz  Not converted: datatype and shape must match the model. FILE.npz without NAME
              provides all its arrays by their names, NAME=FILE.npz:ARRAY one of them.
  .json       A number, a flat list (shaped as the model expects) or nested lists; an object
              provides inputs by name. Numbers must be in the range of the input's datatype.
  .csv        Numbers separated by commas, one row per line; they are checked as in .json.
  images      PNG, JPEG, WebP, BMP, GIF and TIFF with 8 bits per channel. Requires Pillow: pip
              install './weightd[images]'. The image is rotated as its metadata says, converted to
              gray, RGB or RGBA, stretched to the input's size, and arranged as [1, C, H, W] or
              [1, H, W, C], as the model expects. Floats are (value * scale - mean) / std for
              values from 0 to 255; without these options, value / 255. UINT8 has the original
              values.
  -           stdin, in any of these formats, detected by the first bytes.

weightctl metadata MODEL shows the inputs of a model. --random generates the inputs that no --input
provides: floats around 0, other values 0 or 1, in shapes on which the model is known to run, or
with 1 for free dimensions.

--json prints one object as in the Open Inference Protocol, {"model_name", "outputs": [{"name",
"datatype", "shape", "data"}]}, data flat in C order, NaN and infinities as text. With --output,
"file" replaces "data"; with --top, "top" does: for each vector [{"index", "score", "label"}]. An
error is {"error": {"code", "text"}}.

Exit status: 0 good, 1 the request failed, 64 the command line or a shape is invalid, 66 an input
file cannot be used."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="name of the model")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        type=sources.parse_input_argument,
        metavar="[NAME=]FILE",
        help="file for an input, repeatable; NAME may be omitted if the model has one input",
    )
    parser.add_argument(
        "--random",
        nargs="?",
        const=0,
        type=_parse_seed,
        metavar="SEED",
        help="generate the inputs that are not given; SEED selects the values (default: 0)",
    )
    request_inputs.add_shape_argument(parser, " for --random")
    _add_pixel_arguments(parser)
    parser.add_argument(
        "--top",
        type=request_inputs.parse_rows,
        metavar="K",
        help="show the K highest scores of each vector, with their indices",
    )
    parser.add_argument("--labels", metavar="FILE", help="with --top: names of the indices, one per line")
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="write each output to DIR/NAME.npy, or all outputs to the file DIR if it ends in .npz",
    )


def _add_pixel_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scale",
        type=_parse_number,
        metavar="F",
        help="factor for the values of an image (default: 1/255 for floats)",
    )
    parser.add_argument(
        "--mean",
        type=_parse_numbers,
        default=(),
        metavar="F,F,F",
        help="values to subtract after scaling, one or one per channel (default: 0)",
    )
    parser.add_argument(
        "--std",
        type=_parse_numbers,
        default=(),
        metavar="F,F,F",
        help="divisors after subtracting, one or one per channel (default: 1)",
    )


def _parse_seed(argument: str) -> int:
    try:
        seed = int(argument)
    except ValueError:
        seed = -1
    if not 0 <= seed < 2**32:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to {2**32 - 1}, got {argument!r}")
    return seed


def _parse_number(argument: str) -> float:
    [number, *more] = _parse_numbers(argument)
    if more:
        raise argparse.ArgumentTypeError(f"expected one number, got {argument!r}")
    return number


def _parse_numbers(argument: str) -> Tuple[float, ...]:
    try:
        values = tuple(float(each) for each in argument.split(","))
    except ValueError:
        values = (float("nan"),)
    if not all(abs(each) < float("inf") for each in values):
        raise argparse.ArgumentTypeError(f"expected numbers, as in 0.485,0.456,0.406, got {argument!r}")
    return values


def _check_options(options: argparse.Namespace) -> None:
    names = [each.name for each in options.input if each.name]
    for name in names:
        if names.count(name) > 1:
            options.fail(f"argument --input: {name!r} is given twice")
    if options.labels and not options.top:
        options.fail("argument --labels: expected --top, too")
    if options.shape and options.random is None:
        options.fail("argument --shape: expected --random, too, because files determine their shapes")
    if 0 in options.std:
        options.fail("argument --std: expected numbers other than 0")


def _run(options: argparse.Namespace, connect: Connect) -> int:
    _check_options(options)
    labels = numbers.read_labels(options.labels) if options.labels else None
    with connect() as client:
        inputs = _read_inputs(options, client)
        outputs = client.infer(options.model, inputs)
    if labels is not None:
        numbers.check_labels(options.labels, labels, list(outputs.values()))
    output_format = OutputFormat(_write_outputs(options.output, outputs), options.top, labels)
    if options.json:
        print(
            json.dumps(
                {"model_name": options.model, "outputs": [output_format.json(*each) for each in outputs.items()]}
            )
        )
    else:
        for name, array in outputs.items():
            print("\n".join(output_format.lines(name, array)))
    return exit_codes.OK


def _read_inputs(options: argparse.Namespace, client: Client) -> Dict[str, Any]:
    pixels = Pixels(options.scale, options.mean, options.std)
    reader = ArgumentReader(options.model, lambda: client.metadata(options.model).inputs, pixels)
    inputs: Dict[str, Any] = {}
    for given in options.input:
        for name, array in reader.read(given):
            if name in inputs:
                options.fail(f"argument --input: {name!r} is given twice")
            inputs[name] = array
    if options.random is not None:
        metadata = client.metadata(options.model)
        missing = [each for each in metadata.inputs if each.name not in inputs]
        inputs.update(_random_inputs(missing, options, request_inputs.make_example(metadata)))
    return inputs


def _random_inputs(
    missing: Sequence[TensorSignature], options: argparse.Namespace, example: Mapping[str, request_inputs.Shape]
) -> Dict[str, Any]:
    return request_inputs.make_inputs(request_inputs.specify(missing, options.shape, example=example), options.random)


def _write_outputs(output: Optional[str], outputs: Mapping[str, Any]) -> Mapping[str, str]:
    if not output:
        return {}
    return arrays.save_together(output, outputs) if output.endswith(".npz") else arrays.save(output, outputs)


class OutputFormat:
    """How outputs are printed: as text or as JSON.

    Args:
        paths: the files to which outputs were saved, by output name; empty if they were not saved.
        top: the number of highest scores to show of each vector; None to show the values of the outputs.
        labels: the name of each score; None without names.
    """

    def __init__(self, paths: Mapping[str, str], top: Optional[int], labels: Labels) -> None:
        self._paths = paths
        self._top = top
        self._labels = labels

    def lines(self, name: str, array: Any) -> Iterator[str]:
        """Yield the lines of text for one output."""
        heading = arrays.heading(name, array)
        path = self._paths.get(name)
        if path is not None:
            heading = f"{heading} -> {clean(path)}"
        if self._top is not None and numbers.are_scores(array):
            yield heading
            yield from numbers.format_scores(array, self._top, self._labels)
        elif path is not None:
            yield heading
        else:
            yield arrays.as_text(name, array)

    def json(self, name: str, array: Any) -> Dict[str, Any]:
        """Return the JSON form of one output."""
        replacement: Dict[str, Any] = {}
        if name in self._paths:
            replacement["file"] = self._paths[name]
        if self._top is not None and numbers.are_scores(array):
            replacement["top"] = [_scores_json(row) for row in numbers.top_scores(array, self._top, self._labels)]
        return {**arrays.describe(name, array), **replacement} if replacement else arrays.as_json(name, array)


def _scores_json(row: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    return [{**each, "score": arrays.json_number(each["score"])} for each in row]


COMMAND = Command("run a model once, on files, images or random inputs", _DESCRIPTION, _add_arguments, _run)
