"""`weightctl update`, `update-weights` and `reload`: replace a model, its weights or the configuration."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from weightctl import exit_codes
from weightctl.arrays import NPZ
from weightctl.command import BadInput, Command, CommandError, Connect, DaemonUnreachable, explain_denied
from weightctl.text import clean
from weightd.client import Client
from weightd_common.safe_open import open_regular
from weightd_protocol.errors import DeadlineExceeded, RequestError
from weightd_protocol.messages.control import UpdateResponse

_UPDATE = """\
Loads the model at NEW_PATH beside the one that serves. Once every worker of it gives the right
answer to its self-test, and its inputs and outputs are those of the old one, it takes over and
the old one leaves. No request is lost. If anything is wrong with it, the old one goes on serving
and the cause is shown.

  weightctl update resnet50 /models/resnet50-v2.mindir
  weightctl update resnet50 --rollback

For a while there are two copies of the weights: where a card has no room for them, the update is
refused with the figures. A model that is cut over ranks has a path with {rank} in it; where a card
has no second port for its communication, the old one leaves first, and requests wait.

--rollback goes back once: a second one is refused, as it would bring back what was given up.

This waits until it is over: for --timeout seconds, 30 unless it says otherwise. The update itself
goes on after them; weightctl status shows how it stands.

The configuration is not changed: a start that has to load the model anew, as after a reboot, loads
the file that it names. To keep the new one for good, write its path there.

Only the daemon's own user, root, and tenants that may "operate" may do this, over the daemon's
unix socket: not over ipc:// or tcp://. A tenant's user has to be able to read every file of the
new model, unless the file lies below one of the model_dirs of the tenant.

Exit status: 0 the new model serves, 1 it does not and the old one does, 75 it still loads."""

_UPDATE_WEIGHTS = """\
Loads the arrays of an .npz file over the weights of a model that was converted for it
(variable_weights = true), in all workers of the model or in none: generation after generation, as
weightctl update does.

  weightctl update-weights resnet50 /models/finetuned.npz

A start that has to load the model anew loads it without them.

Only the daemon's own user, root, and tenants that may "operate" may do this, over the daemon's
unix socket: not over ipc:// or tcp://. A tenant's user has to be able to read the file, unless
it lies below one of the model_dirs of the tenant.

Exit status: 0 the new weights serve, 1 they do not and the old ones do, 75 they still load."""


class StillLoading(CommandError):
    """The update did not complete within the timeout, but the daemon continues with it."""

    status = exit_codes.NOT_YET
    code = DeadlineExceeded.code


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
    path = _absolute_path(options.path) if options.path else ""
    with connect() as client:
        return _print_result(options, _update_and_wait(client, options.model, path=path, rollback=options.rollback))


def _run_update_weights(options: argparse.Namespace, connect: Connect) -> int:
    weights = _absolute_path(options.weights)
    _check_npz(options.weights)
    with connect() as client:
        return _print_result(options, _update_and_wait(client, options.model, weights=weights))


def _update_and_wait(
    client: Client, model: str, *, path: str = "", weights: str = "", rollback: bool = False
) -> UpdateResponse:
    """Update a model; on a timeout, distinguish an update that takes long from a daemon that does not respond."""
    try:
        with explain_denied(client):
            return client.update(model, path, weights=weights, rollback=rollback)
    except DeadlineExceeded as late:
        try:
            client.server()
        except RequestError:
            raise DaemonUnreachable(late) from None
        raise StillLoading(
            f"{model}: not over within {client.timeout:g} s, and goes on; weightctl status {model} shows how it stands"
        ) from None


def _check_npz(path: str) -> None:
    try:
        with open_regular(path) as file:
            start = file.read(4)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None
    if start not in NPZ:
        raise BadInput(f"{path}: expected an .npz of arrays, as numpy.savez writes it; for a model: weightctl update")


def _absolute_path(path: str) -> str:
    """Make a path absolute for the daemon, which has another working directory, and check that the file exists."""
    absolute = Path(path).absolute()
    # For a path with {rank}, only the file of the first rank is checked.
    first = Path(str(absolute).replace("{rank}", "0"))
    if not first.is_file():
        raise BadInput(f"{first if first != absolute else path}: no such file")
    return str(absolute)


def _print_result(options: argparse.Namespace, response: UpdateResponse) -> int:
    if options.json:
        fields = dataclasses.asdict(response)
        del fields["id"]
        print(json.dumps(fields))
        return exit_codes.OK
    what = "generation" if len(response.generations) == 1 else "generations"
    numbers = ", ".join(map(str, response.generations))
    weights = f" with {clean(response.weights)}" if response.weights else ""
    print(f"{clean(response.model_name)}: {what} {numbers} took over, {clean(response.path)}{weights}")
    if weights or response.path != response.configured_path:
        print(
            f"  a start that has to load it anew goes back to {clean(response.configured_path)}: so says the"
            " configuration"
        )
    return exit_codes.OK


UPDATE_COMMAND = Command("load another model beside the one that serves, and switch", _UPDATE, _add_update, _run_update)
WEIGHTS_COMMAND = Command(
    "load other weights into a model that serves", _UPDATE_WEIGHTS, _add_update_weights, _run_update_weights
)


_RELOAD = """\
Has the daemon read its configuration file again, as SIGHUP does, and no request is lost: new models
load; one that has changed is loaded beside the one that serves and takes over once it serves; one
that is removed finishes what it has accepted, and leaves; one that has failed is loaded again. A
file that is wrong changes nothing, and the error says why.

This returns once the file is in force. weightctl status shows how the loading goes: a change that
fails leaves the model as it was, with the cause beside it.

Only the daemon's own user, root, and tenants that may "operate" every model may do this, over
the daemon's unix socket: not over ipc:// or tcp://.

Exit status: 0 the file is in force, 1 nothing has changed."""


def _add_nothing(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: the command has none."""


def _reload(options: argparse.Namespace, connect: Connect) -> int:
    with connect() as client, explain_denied(client):
        answer = client.reload()
    changes = {
        "added": answer.added,
        "changed": answer.changed,
        "removed": answer.removed,
        "retried": answer.retried,
    }
    if options.json:
        print(json.dumps({what: list(names) for what, names in changes.items()}))
        return exit_codes.OK
    for what, names in changes.items():
        if names:
            print(f"{what}: {', '.join(map(clean, names))}")
    if not any(changes.values()):
        print("configuration in force; no model changed")
    return exit_codes.OK


RELOAD_COMMAND = Command("have the configuration file read again", _RELOAD, _add_nothing, _reload)
