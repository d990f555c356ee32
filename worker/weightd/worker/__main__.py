"""The child process: ``python -m weightd.worker``, started by the daemon."""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple, cast

import zmq

from weightd.protocol import limits
from weightd.protocol.codec import clip, encode
from weightd.protocol.errors import WeightdError
from weightd.protocol.messages.children import Broken
from weightd.shared import multipart
from weightd.shared.modelfile import ModelFileError, digest
from weightd.shared.oom import ABOVE_DAEMON, go_before_the_daemon
from weightd.shared.parent import die_with, ignore_interrupts
from weightd.worker import exits, pagesharing
from weightd.worker.connection import Connection
from weightd.worker.engines import ENGINES
from weightd.worker.engines.engine import Settings
from weightd.worker.engines.errors import BuildError
from weightd.worker.session import Files, Session

_log = logging.getLogger("weightd.worker")

# The last message says why the process leaves: give libzmq this long to hand it over, and no longer.
_LINGER_MS = 2000


def main() -> int:
    """Run one child until the daemon stops it; return its exit status."""
    arguments = _parser().parse_args()
    ignore_interrupts()
    die_with(arguments.parent)
    go_before_the_daemon(arguments.role)
    # A crash, and the SIGABRT of a daemon that has waited too long, leave the stacks of all threads in the log.
    faulthandler.enable()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    pagesharing.prepare()
    context = zmq.Context()
    try:
        return _connected(context, arguments)
    finally:
        context.destroy(linger=_LINGER_MS)


def _connected(context: zmq.Context[zmq.Socket[bytes]], arguments: argparse.Namespace) -> int:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, arguments.name.encode())
    socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    connection = Connection(socket, arguments.address)
    try:
        options = _options(arguments.options)
        sharing = arguments.sharing == "on"
        engine = ENGINES[arguments.engine](Settings(arguments.threads, arguments.device, sharing, options))
    except BuildError as error:
        return _broken(socket, str(error), exits.CANNOT_BUILD)
    except Exception as error:  # noqa: BLE001 - an import runs foreign code: it can fail in any way
        _log.error("%s", error, exc_info=not isinstance(error, WeightdError))
        return _broken(socket, f"{sys.executable}: {error}", exits.NO_ENGINE)
    try:
        sha256 = digest(Path(arguments.model), own=True)
    except ModelFileError as error:
        return _broken(socket, str(error), exits.CANNOT_BUILD)
    files = Files(arguments.model, arguments.store, arguments.weights, arguments.sample)
    return Session(connection, engine, files, arguments.tolerance).run(sha256)


def _options(text: str) -> Dict[str, Any]:
    """The JSON object; what its keys may be is the engine's business."""

    def unique(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
        options: Dict[str, Any] = {}
        for key, value in pairs:
            if key in options:
                raise BuildError(f"options.{key}: given twice")
            options[key] = value
        return options

    try:
        options: Any = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise BuildError(f"options: not JSON: {error}") from None
    if not isinstance(options, dict):
        raise BuildError(f"options: expected a JSON object, got {type(options).__name__}")
    return cast(Dict[str, Any], options)


def _broken(socket: zmq.Socket[bytes], cause: str, status: int) -> int:
    multipart.send(socket, encode(Broken(clip(cause))))
    socket.recv()  # whatever it is: the daemon has read the cause
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m weightd.worker", description="A process of weightd. It is started by the daemon, not by hand."
    )
    parser.add_argument("--address", required=True, help="the daemon's socket for its children")
    parser.add_argument("--name", required=True, help="this process's name and routing id")
    parser.add_argument("--parent", required=True, type=int, help="pid of the process that starts it")
    parser.add_argument("--role", choices=sorted(ABOVE_DAEMON), default="worker", help="what the daemon has it for")
    parser.add_argument("--engine", required=True, choices=sorted(ENGINES), help="the library that runs the model")
    parser.add_argument("--model", required=True, help="path of the model's snapshot")
    parser.add_argument("--store", required=True, help="path where the holder may write its page store")
    parser.add_argument("--threads", required=True, type=int, help="threads of one predict")
    parser.add_argument("--device", required=True, help="where to run: cpu, or ascend:N for a card")
    parser.add_argument("--sharing", choices=["on", "off"], default="on", help="off: a copy of the weights of its own")
    parser.add_argument("--options", default="{}", help="the engine's own options, a JSON object")
    parser.add_argument("--weights", default="", help="an .npz of weights that replace those of the model")
    parser.add_argument("--sample", default="", help="an .npz of inputs to prove the model by")
    parser.add_argument("--tolerance", default=0.0, type=float, help="how far apart answers to these may be")
    return parser


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # noqa: BLE001 - what follows has to be done in any case
        _log.exception("the process fails")
        status = exits.FAILED
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Native libraries have been seen to crash in their exit handlers; the kernel cleans up better.
    os._exit(status)
