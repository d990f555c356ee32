"""Fork server of one interpreter and engine: the daemon runs ``python -m weightd_worker.forkserver``.

Holders and workers are forked from the fork server. The fork server has imported all modules that they need. It has
only one thread and no ZeroMQ context, so that it can be forked. It receives the daemon's orders over its channel, and
exits when the channel closes.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from typing import Any, List

from weightd_common import process_start
from weightd_common.process_attributes import enter_load_priority
from weightd_common.process_start import die_with_named_parent

if __name__ == "__main__":
    # Ignore SIGINT: on Ctrl-C, the daemon stops its children in the right order.
    process_start.reset_signals(signal.SIGINT)
    die_with_named_parent(sys.argv)

# Import numpy.random before any fork: the self-test needs it, and numpy may import it only on first use.
import numpy.random  # noqa: F401  # pyright: ignore[reportUnusedImport]

from weightd_common import endpoints
from weightd_common.stream import Stream
from weightd_protocol import limits
from weightd_protocol.codec import Decoder, encode, type_name
from weightd_protocol.errors import RemoteProtocolError, WeightdError
from weightd_protocol.messages.worker import TO_CHILD, Fork, Forked, Stop
from weightd_worker import arguments as child_arguments
from weightd_worker import connection as channels
from weightd_worker import exit_codes, main_loop, pagesharing, process_memory
from weightd_worker.engines import ENGINES
from weightd_worker.engines.engine import BuildSettings
from weightd_worker.forking import Forker

_log = logging.getLogger("weightd.worker")

# The fork server has the OOM score of a holder, so the kernel kills workers first. If the fork server is killed, the
# processes forked from it survive, but all later processes must be spawned, which takes more time and memory.
_ROLE = "holder"


def main() -> int:
    """Fork children on request until the daemon exits, and return the exit status."""
    arguments = _parser().parse_args(child_arguments.read_arguments())
    process_state = main_loop.prepare_process()
    main_loop.attach_to_parent(_ROLE, arguments.parent, process_state)
    # A fork is a part of a load. Forked processes inherit the priority; workers leave it when they are loaded.
    enter_load_priority(process_state.nice)
    forker = main_loop.make_forker(arguments.parent, process_state)
    try:
        # Make an engine only to import the engine's modules; the engine itself is not used.
        ENGINES[arguments.engine](BuildSettings(1, "cpu"))
    except Exception as error:  # noqa: BLE001 - an import runs foreign code: it can fail in any way
        _log.error("%s: %s", sys.executable, error, exc_info=not isinstance(error, WeightdError))
        return exit_codes.NO_ENGINE
    child_arguments.parser()
    pagesharing.prepare_fork()
    process_memory.drop_unchanged_pages()
    forker.freeze_memory()
    channel = channels.connect(endpoints.channel_path(arguments.address))
    if channel is None:
        _log.error("%s: no process listens on this socket", endpoints.channel_path(arguments.address))
        return exit_codes.FAILED
    return _serve(channel, forker)


def _serve(channel: Stream, forker: Forker) -> int:
    decoder = Decoder(TO_CHILD, max_bytes=limits.MAX_CHILD_HEADER_BYTES)

    def report_forked(forked: Forked) -> bool:
        return channels.send(channel, encode(forked))

    while channels.wait_readable(channel):
        messages: List[Any] = []
        try:
            channels.read(channel, messages)
        except ConnectionError:
            return exit_codes.OK
        for frames in messages:
            order = decoder.decode(frames)
            if isinstance(order, Stop):
                return exit_codes.OK
            if not isinstance(order, Fork):
                raise RemoteProtocolError(f"type: expected fork or stop, got {type_name(order)}")
            forker.fork(order, report_forked)
    return exit_codes.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m weightd_worker.forkserver",
        description="Forks processes of weightd. The daemon starts it; do not start it by hand.",
    )
    parser.add_argument(
        "--engine", required=True, choices=sorted(ENGINES), help="the engine that the forked processes use"
    )
    parser.add_argument(
        "--address", required=True, help="the daemon's socket for its children; the channel's socket is next to it"
    )
    parser.add_argument("--name", required=True, help="this process's name")
    parser.add_argument("--parent", required=True, type=int, help="pid of the process that starts it")
    return parser


if __name__ == "__main__":
    exit_codes.run_and_exit(main)
