"""`weightctl metrics`: prints the daemon's metrics in the Prometheus text format, or serves them over HTTP."""

from __future__ import annotations

import argparse
import json
from typing import Tuple

from weightctl import exit_codes
from weightctl.command import Command, Connect, must_answer
from weightd_common import endpoints
from weightd_common.exposition import exposition
from weightd_protocol.schema import plain

_DESCRIPTION = """\
Prints what the daemon has counted, and how things stand, in the text format of Prometheus: requests
by model, tenant and code; how long they took, waited and ran; queues, processes, their deaths and
restarts; memory, and what sharing saves of it. It is told at once: nothing is measured for it but,
once a minute at most, memory, and then the next answer has it.

Counters go on over restarts of the daemon. For Prometheus, --listen serves the same at /metrics, a
scrape a connection, until it is stopped; while the daemon is away, scrapes are answered with 503:

    weightctl metrics --listen 127.0.0.1:9464

Whoever reaches that address sees the metrics, those of all models and tenants if this user may see
them. Without it, for scripts, and for the textfile collector of the node exporter:

    weightctl metrics >/var/lib/node_exporter/weightd.prom.new &&
        mv /var/lib/node_exporter/weightd.prom.new /var/lib/node_exporter/weightd.prom

A tenant that may not see the "status" of others is told its own requests alone.

--json prints one object: the daemon's answer.

Exit status: 0 good, whatever the metrics say, 69 the daemon cannot be reached or does not answer,
74 nobody can listen at the address."""

_LOOPBACK = "127.0.0.1"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--listen",
        type=_parse_address,
        metavar="[HOST:]PORT",
        help=f"serve the metrics over HTTP at /metrics (default of HOST: {_LOOPBACK})",
    )


def _parse_address(argument: str) -> Tuple[str, int]:
    address = argument if ":" in argument else f"{_LOOPBACK}:{argument}"
    if not endpoints.is_tcp_address(f"tcp://{address}"):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, or a PORT of this host, got {argument!r}")
    host, port = endpoints.split_tcp_address(f"tcp://{address}")
    return host.strip("[]"), port


def _run(options: argparse.Namespace, connect: Connect) -> int:
    if options.listen is not None:
        # Imported here so that other commands do not wait for the import of asyncio.
        import asyncio  # noqa: PLC0415

        from weightctl import exporter  # noqa: PLC0415

        host, port = options.listen
        asyncio.run(exporter.serve(host, port, connect))
        return exit_codes.OK
    with connect() as client, must_answer():
        response = client.metrics()
    print(json.dumps(plain(response)) if options.json else exposition(response), end="\n" if options.json else "")
    return exit_codes.OK


COMMAND = Command("print what was counted, for Prometheus, or serve it", _DESCRIPTION, _add_arguments, _run)
