"""`weightctl models`: what can be asked, and what it takes, in a table."""

from __future__ import annotations

import argparse
import json
from typing import Any, Dict, List, Optional

from weightctl import exit_codes
from weightctl.command import Command, Connect, DaemonUnreachable
from weightctl.text import clean, signature_summary, signatures_json, table
from weightd.client import Client
from weightd_protocol.errors import DeadlineExceeded, RequestError, Unavailable
from weightd_protocol.messages.control import ModelMetadataResponse
from weightd_protocol.messages.status import ModelStatus

_DESCRIPTION = """\
Lists the models: state, engine, and inputs, of those that serve: what others take is not known yet.
A dimension of -1 is free: each request chooses it.

weightctl metadata MODEL tells more of one, and a command that asks it.

--json prints one object, {"models": [{"name", "state", "platform", "inputs", "outputs"}]}, inputs
and outputs as the Open Inference Protocol has them, null where they are not known.

Exit status: 0 good, 69 the daemon cannot be reached."""

_HEADING = ("MODEL", "STATE", "ENGINE", "INPUTS")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def _run(options: argparse.Namespace, connect: Connect) -> int:
    with connect() as client:
        try:
            models = client.status().models
        except (Unavailable, DeadlineExceeded) as error:
            raise DaemonUnreachable(error) from None
        metadata_by_name = {each.name: _fetch_metadata(client, each) for each in models}
    if options.json:
        print(json.dumps({"models": [_as_json(each, metadata_by_name[each.name]) for each in models]}))
    elif models:
        print(
            "\n".join(
                table([_HEADING, *(_row(each, metadata_by_name[each.name]) for each in models)], len(_HEADING), "")
            )
        )
    else:
        print("there is no model")
    return exit_codes.OK


def _fetch_metadata(client: Client, model: ModelStatus) -> Optional[ModelMetadataResponse]:
    """Return what a model takes and gives; None where it does not serve: that would be waited for."""
    if model.state != "serving":
        return None
    try:
        return client.metadata(model.name)
    except RequestError:
        return None  # it has left since


def _row(model: ModelStatus, metadata: Optional[ModelMetadataResponse]) -> List[str]:
    inputs = "-" if metadata is None else signature_summary(metadata.inputs)
    return [clean(model.name), clean(model.state), clean(model.engine), inputs]


def _as_json(model: ModelStatus, metadata: Optional[ModelMetadataResponse]) -> Dict[str, Any]:
    fields = {"name": model.name, "state": model.state, "platform": model.engine}
    if metadata is None:
        return {**fields, "inputs": None, "outputs": None}
    return {**fields, "inputs": signatures_json(metadata.inputs), "outputs": signatures_json(metadata.outputs)}


COMMAND = Command("list the models, and what they take", _DESCRIPTION, _add_arguments, _run)
