"""The command `weightctl metrics`: prints metrics in the text format of Prometheus, or serves them over HTTP."""

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
Prints the daemon's metrics in the Prometheus text format: requests by model, tenant and code;
their durations, waiting times and execution times; queues; processes, their crashes and restarts;
memory, and how much of it sharing saves. The daemon answers immediately: the only measurement is
that of memory, at most once a minute, and the following response contains its result.

Counters continue over restarts of the daemon. For Prometheus, --listen serves the metrics at
/metrics until it is stopped, with one scrape per connection. While the daemon is unavailable,
scrapes get status 503:

    weightctl metrics --listen 127.0.0.1:9464

Any client that reaches that address can read the metrics, which cover all models and tenants if
this user may see them. Without --listen, for scripts and the textfile collector of the node
exporter:

    weightctl metrics >/var/lib/node_exporter/weightd.prom.new &&
        mv /var/lib/node_exporter/weightd.prom.new /var/lib/node_exporter/weightd.prom

A tenant that may not see the "status" of others gets the metrics of its own requests only.

--json prints one object: the daemon's response.

Exit status: 0 good, whatever the metrics say, 69 the daemon cannot be reached or does not respond,
74 the address cannot be used."""

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
        raise argparse.ArgumentTypeError(f"expected HOST:PORT or PORT, got {argument!r}")
    host, port = endpoints.split_tcp_address(f"tcp://{address}")
    return host.strip("[]"), port


def _run(options: argparse.Namespace, connect: Connect) -> int:
    if options.listen is not None:
        # Imported here, because importing asyncio would slow down all other commands.
        import asyncio  # noqa: PLC0415

        from weightctl import exporter  # noqa: PLC0415

        host, port = options.listen
        asyncio.run(exporter.serve(host, port, connect))
        return exit_codes.OK
    with connect() as client, must_answer():
        response = client.metrics()
    print(json.dumps(plain(response)) if options.json else exposition(response), end="\n" if options.json else "")
    return exit_codes.OK


COMMAND = Command("print or serve metrics for Prometheus", _DESCRIPTION, _add_arguments, _run)
