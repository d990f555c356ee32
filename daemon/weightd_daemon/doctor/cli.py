"""`weightd doctor`: runs the checks in order and prints the verdicts."""

from __future__ import annotations

import argparse
import signal
import sys

from weightd_common.terminal import ends_on_hangup
from weightd_daemon.doctor import checks, ranks
from weightd_daemon.doctor.findings import Findings, Verdict, exit_status, render_json, render_table, untestable
from weightd_daemon.doctor.host import Host
from weightd_daemon.doctor.selftest import sharing

_NO_ASCEND_DETAIL = (
    "no Ascend driver or library found: no /dev/davinci*, no driver below /usr/local/Ascend, no libascendcl"
)
_NO_ASCEND_ADVICE = "run weightd doctor on a host with cards; on this host, weightd can serve models on the CPU"
_NO_ASCEND = "no Ascend on this host"


def run(options: argparse.Namespace) -> int:
    """Run the checks, print the verdicts, and return the exit status."""
    # Turn these signals into SystemExit, so that `with` blocks end their processes and remove their files.
    for number in (signal.SIGTERM, *((signal.SIGHUP,) if ends_on_hangup() else ())):
        signal.signal(number, _on_signal)
    findings = check_host(Host(options))
    sys.stdout.write(render_json(findings) if options.json else render_table(findings))
    return exit_status(findings)


def _on_signal(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def check_host(host: Host) -> Findings:
    """Run all checks and return their verdicts. On a host without Ascend, most checks are not testable."""
    findings: dict[str, Verdict] = {name: check(host) for name, check in checks.INDEPENDENT_CHECKS.items()}
    selected = dict(checks.CHECKS) if host.options.ranks is None else {**checks.CHECKS, **ranks.CHECKS}
    if host.has_ascend:
        return {**findings, **{name: check(host) for name, check in selected.items()}, **host.sharing}
    findings["ascend"] = untestable(_NO_ASCEND_DETAIL, _NO_ASCEND_ADVICE)
    for name, check in selected.items():
        # A rank table can be checked without Ascend.
        findings[name] = check(host) if name == ranks.TABLE else untestable(_NO_ASCEND)
    return {**findings, **(sharing.not_run(_NO_ASCEND) if host.options.model else {})}
