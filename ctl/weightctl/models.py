"""The commands `weightctl models`, `metadata` and `health`: models, signatures with example requests, readiness."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from typing import Any, Dict, Iterator, List, Optional, Sequence

import numpy as np

from weightctl import exit_codes
from weightctl.command import Command, Connect, must_answer
from weightctl.request_inputs import make_example, specify
from weightctl.text import clean, signature_lines, signature_summary, signatures_json, table
from weightd.client import Client
from weightd_protocol.datatypes import NUMPY_DTYPE
from weightd_protocol.errors import RequestError
from weightd_protocol.messages.control import ModelMetadataResponse
from weightd_protocol.messages.inference import TensorSpec
from weightd_protocol.messages.status import ModelStatus

_LIST_DESCRIPTION = """\
Lists the models: name, state, engine and inputs. Inputs are known only for serving models. A
dimension of -1 is free: each request chooses it.

weightctl metadata MODEL shows details of one model, and a command that sends a request to it.

--json prints one object, {"models": [{"name", "state", "platform", "inputs", "outputs"}]}, inputs
and outputs as in the Open Inference Protocol, null if they are not known.

Exit status: 0 good, 69 the daemon cannot be reached."""

_LIST_HEADING = ("MODEL", "STATE", "ENGINE", "INPUTS")


def _add_nothing(parser: argparse.ArgumentParser) -> None:
    """Declare no arguments: the command takes none."""


def _list_models(options: argparse.Namespace, connect: Connect) -> int:
    with connect() as client:
        with must_answer():
            models = client.status().models
        metadata_by_name = {each.name: _fetch_metadata(client, each) for each in models}
    if options.json:
        print(json.dumps({"models": [_model_json(each, metadata_by_name[each.name]) for each in models]}))
    elif models:
        rows = [_model_row(each, metadata_by_name[each.name]) for each in models]
        print("\n".join(table([_LIST_HEADING, *rows], len(_LIST_HEADING), "")))
    else:
        print("no models")
    return exit_codes.OK


def _fetch_metadata(client: Client, model: ModelStatus) -> Optional[ModelMetadataResponse]:
    """Return the signature of a model, or None if the model does not serve.

    For a model that does not serve, no request is sent, because the daemon would reply only once the model serves.
    """
    if model.state != "serving":
        return None
    try:
        return client.metadata(model.name)
    except RequestError:
        return None  # the model stopped serving after the status was read


def _model_row(model: ModelStatus, metadata: Optional[ModelMetadataResponse]) -> List[str]:
    inputs = "-" if metadata is None else signature_summary(metadata.inputs)
    return [clean(model.name), clean(model.state), clean(model.engine), inputs]


def _model_json(model: ModelStatus, metadata: Optional[ModelMetadataResponse]) -> Dict[str, Any]:
    fields = {"name": model.name, "state": model.state, "platform": model.engine}
    if metadata is None:
        return {**fields, "inputs": None, "outputs": None}
    return {**fields, "inputs": signatures_json(metadata.inputs), "outputs": signatures_json(metadata.outputs)}


MODELS_COMMAND = Command("list the models and their inputs", _LIST_DESCRIPTION, _add_nothing, _list_models)


_METADATA_DESCRIPTION = """\
Shows the inputs and outputs of MODEL: names, datatypes and shapes; and how to send a request to it
from a shell and from Python, as lines that can be copied and run. A dimension of -1 is free: each
request chooses it.

While the model loads, the command waits for at most --timeout seconds.

--json prints one object as in the Open Inference Protocol, {"name", "platform", "inputs",
"outputs"}; a shape is null if the model accepts any rank. "example_shapes" are shapes by input on
which the model is known to run.

Exit status: 0 good, 1 there is no such model, or it does not serve."""


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="name of the model")


def _show_metadata(options: argparse.Namespace, connect: Connect) -> int:
    with connect() as client:
        metadata = client.metadata(options.model)
    if options.json:
        print(json.dumps(_metadata_json(metadata)))
    else:
        print("\n".join(_metadata_lines(metadata, options)))
    return exit_codes.OK


def _metadata_lines(metadata: ModelMetadataResponse, options: argparse.Namespace) -> Iterator[str]:
    yield f"{clean(metadata.name)}: {clean(metadata.platform)}"
    for what, tensors in (("inputs", metadata.inputs), ("outputs", metadata.outputs)):
        yield f"  {what}"
        yield from signature_lines(tensors, "    ")
    specs = example_inputs(metadata)
    yield ""
    yield shell_command(metadata, specs, options)
    yield ""
    yield from python_program(metadata.name, specs, options)


def example_inputs(metadata: ModelMetadataResponse) -> Sequence[TensorSpec]:
    """Return example inputs that the model should accept. An input of any rank gets one dimension."""
    known_shapes = make_example(metadata)
    default_shapes = [
        (each.name, (1,)) for each in metadata.inputs if each.shape is None and each.name not in known_shapes
    ]
    return specify(metadata.inputs, default_shapes, example=known_shapes)


def shell_command(metadata: ModelMetadataResponse, specs: Sequence[TensorSpec], options: argparse.Namespace) -> str:
    """Return a `weightctl predict` command for the model that works in any shell and connects to the same daemon."""
    words = ["weightctl", *_connection_options(options), "predict", metadata.name, "--random"]
    for each, signature in zip(specs, metadata.inputs):
        if signature.shape is None and not metadata.example:
            words += ["--shape", f"{each.name}={','.join(map(str, each.shape))}"]
    return " ".join(map(_quote, words))


def _quote(text: str) -> str:
    """Quote a word for a shell. If it has unprintable characters, use the form $'...' of bash and zsh."""
    return shlex.quote(text) if text.isprintable() else f"$'{''.join(map(_escape, text))}'"


def _escape(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    return character if character.isprintable() else "".join(f"\\x{byte:02x}" for byte in character.encode())


def _connection_options(options: argparse.Namespace) -> List[str]:
    """Return the command-line options that select the daemon and the tenant of `options`."""
    values = {"--socket": _daemon_address(options), "--key": options.key, "--server-key": options.server_key}
    values["--tenant"] = options.tenant
    return [word for option, value in values.items() if value for word in (option, value)]


def _daemon_address(options: argparse.Namespace) -> str:
    """Return the daemon's address; "" if it is the default.

    $WEIGHTD_SOCKET counts as an address, because it may not be set in the shell where the user runs the example.
    """
    return options.socket or os.environ.get("WEIGHTD_SOCKET", "")


def python_program(model: str, specs: Sequence[TensorSpec], options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of a Python program that sends the example request."""
    arguments = [repr(_daemon_address(options))] if _daemon_address(options) else []
    named = (("key", options.key), ("server_key", options.server_key), ("tenant", options.tenant))
    arguments += [f"{name}={value!r}" for name, value in named if value]
    inputs = ", ".join(f"{each.name!r}: numpy.zeros({each.shape!r}, {_dtype(each)!r})" for each in specs)
    yield "import numpy"
    yield "from weightd import Client"
    yield ""
    yield f"with Client({', '.join(arguments)}) as client:"
    yield f"    print(client.infer({model!r}, {{{inputs}}}))"


def _dtype(spec: TensorSpec) -> str:
    return str(np.dtype(NUMPY_DTYPE[spec.datatype]).name)


def _metadata_json(metadata: ModelMetadataResponse) -> Dict[str, Any]:
    fields = {"name": metadata.name, "platform": metadata.platform}
    tensors = {"inputs": signatures_json(metadata.inputs), "outputs": signatures_json(metadata.outputs)}
    shapes = {each.name: list(shape) for each, shape in zip(metadata.inputs, metadata.example or ())}
    return {**fields, **tensors, "example_shapes": shapes or None}


METADATA_COMMAND = Command(
    "show a model's inputs and outputs, and an example request", _METADATA_DESCRIPTION, _add_model, _show_metadata
)


_HEALTH_DESCRIPTION = """\
Checks whether MODEL, or every model, is ready: one of its workers has answered a request or a ping
within the watchdog's period. Existing processes alone do not make a model ready.

  weightctl health && echo ready
  weightctl health resnet50

Exit status: 0 ready, 75 not ready, 69 the daemon cannot be reached or does not respond."""


def _add_optional_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", default="", help="name of the model (default: all models)")


def _check_health(options: argparse.Namespace, connect: Connect) -> int:
    with connect() as client, must_answer():
        answer = client.ready(options.model)
    if options.json:
        print(json.dumps({"model_name": options.model, "ready": answer.ready, "reason": answer.reason}))
    else:
        print("ready" if answer.ready else f"not ready: {clean(answer.reason)}")
    return exit_codes.OK if answer.ready else exit_codes.NOT_YET


HEALTH_COMMAND = Command(
    "check whether a model, or every model, is ready", _HEALTH_DESCRIPTION, _add_optional_model, _check_health
)
