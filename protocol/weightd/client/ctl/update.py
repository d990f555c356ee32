"""`weightctl update` and `weightctl update-weights`: another model, or other weights, without an interruption."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from weightd.client.ctl import exits
from weightd.client.ctl.text import clean
from weightd.client.ctl.verb import BadInput, Connect, Verb
from weightd.protocol.messages import UpdateResponse

_UPDATE = """\
Loads the model at NEW_PATH beside the one that serves. Once every worker of it gives the right
answer to the canary, and its inputs and outputs are those of the old one, it takes over and the
old one leaves. No request is lost. If anything is wrong with it, the old one goes on serving and
the cause is shown.

  weightctl update resnet50 /models/resnet50-v2.mindir
  weightctl update resnet50 --rollback

For a while there are two copies of the weights: where a card has no room for them, the update is
refused with the figures.

This waits until it is over: for --timeout seconds, 30 unless it says otherwise. The update itself
goes on after them; weightctl status shows how it stands.

Exit status: 0 the new model serves, 1 it does not and the old one does."""

_UPDATE_WEIGHTS = """\
Loads the arrays of an .npz file over the weights of a model that was converted for it
(variable_weights = true), in all workers of the model or in none: generation after generation, as
weightctl update does.

  weightctl update-weights resnet50 /models/finetuned.npz

Exit status: 0 the new weights serve, 1 they do not and the old ones do."""


def _add_update(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the model's name, see weightctl status")
    parser.add_argument("path", nargs="?", default="", metavar="NEW_PATH", help="the new model file")
    parser.add_argument(
        "--rollback", action="store_true", help="go back to what served before the last update; without NEW_PATH"
    )


def _add_update_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the model's name, see weightctl status")
    parser.add_argument("weights", metavar="WEIGHTS.npz", help="arrays by the names that the model has for them")


def _run_update(options: argparse.Namespace, connect: Connect) -> int:
    if options.rollback == bool(options.path):
        options.fail("expected NEW_PATH or --rollback, one of the two")
    path = _absolute(options.path) if options.path else ""
    with connect() as client:
        return _tell(options, client.update(options.model, path, rollback=options.rollback))


def _run_update_weights(options: argparse.Namespace, connect: Connect) -> int:
    weights = _absolute(options.weights)
    with connect() as client:
        return _tell(options, client.update(options.model, weights=weights))


def _absolute(path: str) -> str:
    """The daemon has another working directory; that the file is there is looked at here, where it is cheap."""
    absolute = Path(path).absolute()
    if not absolute.is_file():
        raise BadInput(f"{path}: no such file")
    return str(absolute)


def _tell(options: argparse.Namespace, response: UpdateResponse) -> int:
    numbers = ", ".join(map(str, response.generations))
    if options.json:
        print(json.dumps({"model_name": response.model_name, "generations": list(response.generations)}))
    else:
        what = "generation" if len(response.generations) == 1 else "generations"
        print(f"{clean(response.model_name)}: {what} {numbers} took over")
    return exits.OK


VERB = Verb("load another model beside the one that serves, and switch", _UPDATE, _add_update, _run_update)
WEIGHTS_VERB = Verb(
    "load other weights into a model that serves", _UPDATE_WEIGHTS, _add_update_weights, _run_update_weights
)
