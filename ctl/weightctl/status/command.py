"""The command: its arguments, what it asks, and what that means for a script."""

from __future__ import annotations

import argparse
import dataclasses
import json

from weightctl import exit_codes
from weightctl.command import Command, Connect, check_model, must_answer
from weightctl.status import render
from weightd_common.dashboard.memory import pss_total
from weightd_protocol.messages.status import StatusResponse

_DESCRIPTION = """\
Shows each model with its generations (one weight copy each) and their processes.

NOW is how many requests a process has under way. Latencies are the daemon's, from a request's
arrival to its answer, over the last answers. PSS is a process's proportional set size: its own
memory, and its share of what it shares with others; so the PSS of all processes adds up to what
the service takes. OWN is what no other process has: what its end would give back. SHARED is how
much of a worker's weights is memory that it has in common with the others. MB is 10^6 bytes.

A generation on several sets of cores, such as cpu:0 and cpu:1, is one "on cpu"; below its processes
it is told who of them is on which.

The ranks of a model that is cut over several processes are one generation, "on" the devices of all;
below them it is told who is on which, and which slice each has. A broker lets them find each other.

Processes are spawned with an interpreter of their own, forked of a fork server, which has loaded
the engine, or forked of the template: that is the holder, which has built the model.

What the daemon keeps for clients are requests under way and answers that they have not read; the
bound is max_memory_bytes of the configuration.

Where the daemon's control group (cgroup) is limited or under pressure, the last line shows what it
takes, cached files included, of what it and those above it may take. Beyond "high" the kernel slows
the processes down, beyond the limit it kills one. Pressure is the share of the last 10 s in which
some process waited for memory. MiB is 2^20 bytes, as in MemoryMax= of systemd.

Where there are tenants, a table shows what each has asked of each model since it is there, restarts
of the daemon included: its requests, how many of them were served and refused, those under way NOW
and of these QUEUED, its ROWS, the seconds for which workers were busy with it (SLOT), how long a
request waited for a worker on average (WAIT), and the bytes of tensors that were sent IN and OUT.
"(other)" is what was asked of models that are gone, and what was refused before a model was known.
Below stand weights, shares of the last minute, and why requests were refused: by a bound of the
tenant, as max_rate, or with the code of an error. A tenant that may not see the "status" of others
is shown its own requests alone.

--json prints one object: the daemon's answer, and pss_total_bytes, the memory of the whole service.

Exit status: 0 every model serves, 75 one does not serve yet, 1 one has failed (its cause is shown)."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="only this model (default: all)")


def _run(options: argparse.Namespace, connect: Connect) -> int:
    with connect() as client, must_answer():
        response = client.status()
    total = pss_total(response)
    if options.model is not None:
        response = filter_model(response, options.model)
    print(json.dumps(render.as_json(response, total)) if options.json else render.render(response, total))
    return exit_status(response)


def filter_model(response: StatusResponse, name: str) -> StatusResponse:
    """Return `response` without the other models.

    Raises:
        NotFound: there is no such model.
    """
    check_model(response, name)
    return dataclasses.replace(response, models=tuple(model for model in response.models if model.name == name))


def exit_status(response: StatusResponse) -> int:
    """Return what the models' states mean for a script."""
    states = {model.state for model in response.models}
    if "failed" in states:
        return exit_codes.ERROR
    return exit_codes.OK if states <= {"serving"} else exit_codes.NOT_YET


COMMAND = Command("show the models, their processes and their memory", _DESCRIPTION, _add_arguments, _run)
