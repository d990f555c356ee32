"""`weightctl keygen`: creates CURVE key pairs for listeners and clients."""

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
Makes a pair of keys for each NAME, for TCP that is encrypted and tells who asks (CURVE): NAME.key
is the secret one, which nobody else may read, and NAME.pub the public one, which anybody may. It
asks no daemon, and never overwrites a file.

A listener of the daemon has a pair of its own, and so has each client, or user:

  weightctl keygen /etc/weightd/server        # on the daemon's host, owned by its user
  weightctl keygen alice                      # where alice is; alice.pub goes to the daemon's host

  [listeners.lan]
  address = "tcp://0.0.0.0:7878"
  security = "curve"
  key = "server.key"

  [tenants.research]
  keys = ["alice.pub"]

A client needs its own alice.key, and server.pub, to know the daemon by. A tenant may have several
keys: to change one, add the new one, reload, hand it out, then take the old one away, and reload.

Exit status: 0 the keys are made, 69 this ZeroMQ has no CURVE, 74 a file is there already, or cannot
be written."""

_DEFAULT = "weightd"


class _NoCurve(CommandError):
    """This build of ZeroMQ does not support CURVE."""

    status = exit_codes.UNAVAILABLE
    code = Unavailable.code


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"a path, to which .key and .pub are added (default: {_DEFAULT})"
    )


def _run(options: argparse.Namespace, _: Connect) -> int:
    if not zmq.has("curve"):
        raise _NoCurve("this ZeroMQ was built without CURVE; the wheels of pyzmq have it")
    pairs: List[Dict[str, str]] = []
    for name in options.names or [_DEFAULT]:
        pairs.append(_write_key_pair(name))
        if not options.json:
            _print_pair(pairs[-1])
    if options.json:
        print(json.dumps({"keys": pairs}))
    return exit_codes.OK


def _write_key_pair(name: str) -> Dict[str, str]:
    """Write both key files, or neither."""
    public, secret = (each.decode("ascii") for each in zmq.curve_keypair())
    files = {"secret": f"{name}.key", "public": f"{name}.pub"}
    secret_text = format_key_file(SECRET, secret, "The secret key: nobody but its owner reads it.")
    public_text = format_key_file(PUBLIC, public, "The public key: it is for who has to know it.")
    with _new_file(files["secret"], 0o600, secret_text), _new_file(files["public"], 0o644, public_text):
        pass
    return {"name": name, **files, "public_key": public}


@contextlib.contextmanager
def _new_file(path: str, mode: int, text: str) -> Generator[None, None, None]:
    """Create a file; delete it again if the block fails."""
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
    print(f"{secret}: the secret key; it stays with who asks with it: a listener's `key`, or a client")
    print(f"{public}: the public key, {pair['public_key']}; a client's goes into the `keys` of its tenant,")
    print("  that of a listener to its clients")


COMMAND = Command("make keys for encrypted TCP", _DESCRIPTION, _add_arguments, _run)
