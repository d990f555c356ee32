"""The commands `weightctl update`, `update-weights` and `reload`: replace a model, its weights or the configuration."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Set

from weightctl import exit_codes
from weightctl.arrays import NPZ
from weightctl.command import BadInput, Command, Connect, NotComplete, explain_denied, operation_on
from weightctl.text import clean
from weightd.client import Client
from weightd_common.safe_open import open_regular
from weightd_protocol.messages.control import ReloadResponse, UpdateResponse
from weightd_protocol.messages.status import ModelStatus

_UPDATE = """\
Replaces a model without losing requests: loads the model at NEW_PATH while the old one serves, and
switches once every worker passes its self-test and the inputs and outputs match the old model. If
anything fails, the old model continues to serve, and the cause is shown.

  weightctl update resnet50 /models/resnet50-v2.mindir
  weightctl update resnet50 --rollback

During the update there are two copies of the weights. If a card has no memory for both, the update
is refused, and the error shows the sizes. The path of a model that is split over ranks contains
{rank}. If a card has no second port for the communication of ranks, the old model is unloaded
first, and requests wait.

--rollback returns to the model before the last update. A second rollback is refused, because it
would restore the model that was given up.

The command waits until the update is complete, for at most --timeout seconds (default: 30). After
a timeout the update continues; weightctl status shows its progress.

The configuration file does not change: a daemon that loads the model again, for example after a
reboot, loads the configured file. To keep the new model, set its path there.

Allowed for root, the daemon's own user, and tenants that may "operate", over the daemon's Unix
socket only, not over ipc:// or tcp://. A tenant's user must be able to read every file of the new
model, unless the file is below one of the tenant's model_dirs.

Exit status: 0 the new model serves, 1 the update failed and the old model serves, 75 still
loading."""

_UPDATE_WEIGHTS = """\
Loads the arrays of an .npz file into the weights of a model that was converted for it
(variable_weights = true), in all workers of the model or in none. Generations are replaced one
after another, as by weightctl update.

  weightctl update-weights resnet50 /models/finetuned.npz

A daemon that loads the model again, for example after a reboot, does not load these arrays.

Allowed for root, the daemon's own user, and tenants that may "operate", over the daemon's Unix
socket only, not over ipc:// or tcp://. A tenant's user must be able to read the file, unless it is
below one of the tenant's model_dirs.

Exit status: 0 the new weights serve, 1 failed and the old weights serve, 75 still loading."""


# Part of a model's note which says that a reload could not replace the model.
_NOT_IN_FORCE = "the changed configuration is not in force"

_POLL_INTERVAL_S = 0.1


def _add_update(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="name of the model")
    parser.add_argument("path", nargs="?", default="", metavar="NEW_PATH", help="file of the new model")
    parser.add_argument(
        "--rollback", action="store_true", help="return to the model before the last update, without NEW_PATH"
    )


def _add_update_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="name of the model")
    parser.add_argument("weights", metavar="WEIGHTS.npz", help="arrays by the names of the model's weights")


def _run_update(options: argparse.Namespace, connect: Connect) -> int:
    if options.rollback == bool(options.path):
        options.fail("expected either NEW_PATH or --rollback")
    path = _absolute_path(options.path) if options.path else ""
    with connect() as client, operation_on(client, options.model, "update"):
        response = client.update(options.model, path, rollback=options.rollback)
    return _print_result(options, response)


def _run_update_weights(options: argparse.Namespace, connect: Connect) -> int:
    weights = _absolute_path(options.weights)
    _check_npz(options.weights)
    with connect() as client, operation_on(client, options.model, "update"):
        response = client.update(options.model, weights=weights)
    return _print_result(options, response)


def _check_npz(path: str) -> None:
    try:
        with open_regular(path) as file:
            start = file.read(4)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None
    if start not in NPZ:
        raise BadInput(f"{path}: expected an .npz file of numpy.savez; to load another model, use `weightctl update`")


def _absolute_path(path: str) -> str:
    """Make a path absolute, because the daemon has another working directory. Check that the file exists."""
    absolute = Path(path).absolute()
    # If the path contains {rank}, check only the file of rank 0.
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
    print(f"{clean(response.model_name)}: {what} {numbers} now serving, {clean(response.path)}{weights}")
    if weights or response.path != response.configured_path:
        print(f"  the configuration still names {clean(response.configured_path)}, which is loaded after a reboot")
    return exit_codes.OK


UPDATE_COMMAND = Command("replace a model without losing requests", _UPDATE, _add_update, _run_update)
WEIGHTS_COMMAND = Command(
    "load other weights into a serving model", _UPDATE_WEIGHTS, _add_update_weights, _run_update_weights
)


_RELOAD = """\
Reloads the daemon's configuration file, as SIGHUP does, without losing requests. New models are
loaded. A changed model is loaded while the old one serves, and replaces it. A removed model
finishes its accepted requests and is unloaded. A failed model is loaded again. If the file is
invalid, nothing changes, and the error gives the reason.

The command returns when the file is in force. weightctl status shows the progress of loading. If a
changed model fails to load, the old one continues to serve, and its status shows the cause. With
--wait the command returns when every new, changed and retried model serves or has failed.

--dry-run shows the changes that a reload would make, and makes none.

Allowed for root, the daemon's own user, and tenants that may "operate" every model, over the
daemon's Unix socket only, not over ipc:// or tcp://.

Exit status: 0 the file is in force, 1 nothing has changed or, with --wait, a model has failed, 75
with --wait: not complete after --timeout seconds."""


def _add_reload(parser: argparse.ArgumentParser) -> None:
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--wait", action="store_true", help="return when the models serve or have failed")
    how.add_argument("--dry-run", action="store_true", help="only show what would change")


def _reload(options: argparse.Namespace, connect: Connect) -> int:
    with connect() as client:
        with explain_denied(client):
            answer = client.reload(dry_run=options.dry_run)
        status = _print_changes(options, answer)
        if options.wait:
            status = _wait_for_models(client, {*answer.added, *answer.changed, *answer.retried})
    return status


def _wait_for_models(client: Client, names: Set[str]) -> int:
    """Wait until each of these models has loaded its new configuration, or has failed; return the exit status."""
    deadline = time.monotonic() + client.timeout
    while True:
        models = [model for model in client.status().models if model.name in names]
        failed = [model for model in models if model.state == "failed" or _NOT_IN_FORCE in model.note]
        loading = [model for model in models if model not in failed and not _is_loaded(model)]
        if not loading:
            for model in failed:
                causes = [each.reason for each in model.generations if each.reason]
                print(f"{clean(model.name)}: {clean(model.note or '; '.join(causes) or 'failed')}")
            return exit_codes.ERROR if failed else exit_codes.OK
        if time.monotonic() >= deadline:
            waiting = ", ".join(clean(each.name) for each in loading)
            raise NotComplete(f"not complete after {client.timeout:g} s: {waiting}; see `weightctl status`")
        time.sleep(_POLL_INTERVAL_S)


def _is_loaded(model: ModelStatus) -> bool:
    states = [each.state for each in model.generations]
    return model.state == "unloaded" or states == ["serving"] * len(states)


def _print_changes(options: argparse.Namespace, answer: ReloadResponse) -> int:
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
            print(f"{'would be ' if options.dry_run else ''}{what}: {', '.join(map(clean, names))}")
    if not any(changes.values()):
        print("no model would change" if options.dry_run else "configuration in force; no model changed")
    return exit_codes.OK


RELOAD_COMMAND = Command("reload the configuration file", _RELOAD, _add_reload, _reload)
