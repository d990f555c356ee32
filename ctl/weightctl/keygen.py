"""The command `weightctl keygen`: creates CURVE key pairs for listeners and clients."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path
from typing import Dict, Generator, List

import zmq

from weightctl import exit_codes
from weightctl.command import BadOutput, Command, CommandError, Connect
from weightctl.text import clean
from weightd_common.curve_keys import PUBLIC, SECRET, format_key_file
from weightd_protocol.errors import Unavailable

_DESCRIPTION = """\
Creates a key pair for each NAME, for encrypted and authenticated TCP (CURVE): NAME.key is the
secret key, readable only by its owner, and NAME.pub the public key, which is not confidential. The
command does not contact a daemon and never overwrites a file.

Each listener of the daemon has its own key pair, and so has each client or user:

  weightctl keygen /etc/weightd/server        # on the daemon's host, owned by its user
  weightctl keygen alice                      # on alice's host; copy alice.pub to the daemon's host

  [listeners.lan]
  address = "tcp://0.0.0.0:7878"
  security = "curve"
  key = "server.key"

  [tenants.research]
  keys = ["alice.pub"]

A client needs alice.key to identify itself, and server.pub to identify the daemon. A tenant may
have several keys: to replace a key, add the new one, reload, distribute it, then remove the old
one and reload again.

Exit status: 0 the keys were created, 69 libzmq was built without CURVE, 74 a file exists already
or cannot be written."""

_DEFAULT = "weightd"


class _NoCurve(CommandError):
    """The installed libzmq was built without CURVE."""

    status = exit_codes.UNAVAILABLE
    code = Unavailable.code


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"path of the files, without .key and .pub (default: {_DEFAULT})"
    )


def _run(options: argparse.Namespace, _: Connect) -> int:
    if not zmq.has("curve"):
        raise _NoCurve("this libzmq was built without CURVE; install a pyzmq wheel, which includes CURVE")
    pairs: List[Dict[str, str]] = []
    for name in options.names or [_DEFAULT]:
        pairs.append(_write_key_pair(name))
        if not options.json:
            _print_pair(pairs[-1])
    if options.json:
        print(json.dumps({"keys": pairs}))
    return exit_codes.OK


def _write_key_pair(name: str) -> Dict[str, str]:
    """Write the files of the secret and the public key. If one cannot be written, remove the other."""
    public, secret = (each.decode("ascii") for each in zmq.curve_keypair())
    files = {"secret": f"{name}.key", "public": f"{name}.pub"}
    secret_text = format_key_file(SECRET, secret, "The secret key: only its owner may read it.")
    public_text = format_key_file(PUBLIC, public, "The public key: it is not confidential.")
    with _new_file(files["secret"], 0o600, secret_text), _new_file(files["public"], 0o644, public_text):
        pass
    return {"name": name, **files, "public_key": public}


@contextlib.contextmanager
def _new_file(path: str, mode: int, text: str) -> Generator[None, None, None]:
    """Context manager that creates a file with this text. If the block raises an error, the file is deleted."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except (OSError, ValueError) as error:
        raise BadOutput(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        yield
    except OSError as error:
        Path(path).unlink()
        raise BadOutput(f"{path}: {error.strerror}") from None
    except BaseException:
        Path(path).unlink()
        raise


def _print_pair(pair: Dict[str, str]) -> None:
    secret, public = (clean(pair[each]) for each in ("secret", "public"))
    print(f"{secret}: secret key, for the `key` of a listener, or for one client")
    print(f"{public}: public key, {pair['public_key']}; add a client's to the `keys` of its tenant,")
    print("  give a listener's to its clients")


COMMAND = Command("create keys for encrypted TCP", _DESCRIPTION, _add_arguments, _run)
