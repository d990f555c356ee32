"""`weightctl predict`: one request, its inputs from .npy files."""

from __future__ import annotations

import argparse
import json
from typing import Any, Dict, Mapping, Tuple

from weightd.ctl import arrays, exits
from weightd.ctl.text import clean
from weightd.ctl.verb import Connect, Verb

_DESCRIPTION = """\
Runs a model once and shows its outputs: name, datatype, shape, and values or their corners.

  python3 -c 'import numpy; numpy.save("x.npy", numpy.ones((1, 64), "float32"))'
  weightctl predict tiny --input x=x.npy

Nothing is converted: datatype and shape of each file must be what the model takes.

--json prints one object as the Open Inference Protocol has it, {"model_name", "outputs": [{"name",
"datatype", "shape", "data"}]}, data flat in C order, NaN and infinities as text; with --output, the
"file" takes the place of the "data". An error is {"error": {"code", "text"}}.

Exit status: 0 good, 1 the request ended in an error, 66 an input file cannot be used."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the model's name, see weightctl status")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        type=_named_file,
        metavar="NAME=FILE.npy",
        help="an input of the model; once for each",
    )
    parser.add_argument(
        "--output", metavar="DIR", help="write each output to DIR/NAME.npy instead of showing its values"
    )


def _named_file(argument: str) -> Tuple[str, str]:
    name, equals, path = argument.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"expected NAME=FILE.npy, got {argument!r}")
    return name, path


def _run(options: argparse.Namespace, connect: Connect) -> int:
    inputs: Dict[str, Any] = {}
    for name, path in options.input:
        if name in inputs:
            options.fail(f"argument --input: {name!r} is given twice")
        inputs[name] = arrays.load(path)
    with connect() as client:
        outputs = client.infer(options.model, inputs)
    paths = arrays.save(options.output, outputs) if options.output else {}
    show = _show_json if options.json else _show_text
    show(options.model, outputs, paths)
    return exits.OK


VERB = Verb("run a model once on arrays from .npy files", _DESCRIPTION, _add_arguments, _run)


def _show_text(model: str, outputs: Mapping[str, Any], paths: Mapping[str, str]) -> None:
    for name, array in outputs.items():
        if name in paths:
            print(f"{arrays.heading(name, array)} -> {clean(paths[name])}")
        else:
            print(arrays.as_text(name, array))


def _show_json(model: str, outputs: Mapping[str, Any], paths: Mapping[str, str]) -> None:
    shown = [
        {**arrays.describe(name, array), "file": paths[name]} if name in paths else arrays.as_json(name, array)
        for name, array in outputs.items()
    ]
    print(json.dumps({"model_name": model, "outputs": shown}))
