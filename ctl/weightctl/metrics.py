"""`weightctl metrics`: what the daemon has counted, in the text format of Prometheus."""

from __future__ import annotations

import argparse
import json

from weightctl import exit_codes
from weightctl.command import Command, Connect, DaemonUnreachable
from weightd_common.exposition import exposition
from weightd_protocol.errors import DeadlineExceeded, Unavailable
from weightd_protocol.schema import plain

_DESCRIPTION = """\
Prints what the daemon has counted, and how things stand, in the text format of Prometheus: requests
by model, tenant and code; how long they took, waited and ran; queues, processes, their deaths and
restarts; memory, and what sharing saves of it. It is told at once: nothing is measured for it but,
once a minute at most, memory, and then the next answer has it.

Counters go on over restarts of the daemon. The key metrics of the table [daemon] has the daemon
serve the same to Prometheus itself; this is for scripts, and for the textfile collector of the node
exporter:

    weightctl metrics >/var/lib/node_exporter/weightd.prom.new &&
        mv /var/lib/node_exporter/weightd.prom.new /var/lib/node_exporter/weightd.prom

A tenant that may not see the "status" of others is told its own requests alone.

--json prints one object: the daemon's answer.

Exit status: 0 good, whatever the metrics say, 69 the daemon cannot be reached or does not answer."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def _run(options: argparse.Namespace, connect: Connect) -> int:
    with connect() as client:
        try:
            response = client.metrics()
        except (Unavailable, DeadlineExceeded) as error:
            raise DaemonUnreachable(error) from None
    print(json.dumps(plain(response)) if options.json else exposition(response), end="\n" if options.json else "")
    return exit_codes.OK


COMMAND = Command("print what was counted, for Prometheus", _DESCRIPTION, _add_arguments, _run)
