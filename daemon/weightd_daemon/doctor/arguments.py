"""Command-line arguments of `weightd doctor`. The modules that do the work are imported only when the command runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from weightd_common.devices import card_of

if TYPE_CHECKING:
    from weightd_daemon.config.selftest import SelfTestSetting

HELP = "check an Ascend host: interpreter, driver, cards, and sharing between real processes"

_DESCRIPTION = """\
Checks the requirements of weightd on an Ascend host. Prints one line for each check: pass, fail or not testable, the
finding, and what to do. With --model it shares the weights of this model among real worker processes, kills the
process that built them, and starts a process that must be rejected; do not use a device that serves requests. It needs
memory for one copy of the weights, for a small model for a second one to compare, and up to four processes at a time.

With --ranks it checks the requirements of a model with ranks on several cards; it starts no rank.

If systemd has a unit for weightd, the doctor checks the environment of this unit instead of the shell's; the line
`service` shows which. Each check runs in child processes with a time limit; none of them remains.

Exit status: 0 no check failed (some may not be testable), 1 a check failed, 64 invalid command line, 69 no Ascend
driver or library found."""

_STEP_TIMEOUT_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of the command to a parser."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="FILE",
        help="Python interpreter with MindSpore Lite and weightd (default: this one)",
    )
    parser.add_argument(
        "--device", type=_parse_device, default=0, metavar="ascend:N", help="device to check (default: ascend:0)"
    )
    parser.add_argument("--model", type=Path, metavar="FILE.mindir", help="share the weights of this model")
    parser.add_argument(
        "--selftest",
        type=_parse_selftest,
        default="auto",
        metavar="VALUE",
        help="like the key selftest of a model: FILE.npz, or shapes such as {x = [1, 3, 48, 320]} (default: auto)",
    )
    parser.add_argument(
        "--selftest-tolerance",
        type=_parse_tolerance,
        default=0.0,
        metavar="SHARE",
        help="like the key selftest_tolerance of a model (default: 0)",
    )
    parser.add_argument(
        "--ranks",
        type=_parse_devices,
        nargs="?",
        const=(),
        metavar="ascend:N,...",
        help="check the requirements of a model with ranks on these devices, in this order (default: all devices)",
    )
    parser.add_argument("--rank-table", type=Path, metavar="FILE", help="with --ranks: the rank table of these devices")
    parser.add_argument(
        "--limit",
        type=_parse_seconds,
        default=_STEP_TIMEOUT_S,
        metavar="SECONDS",
        help="time limit of one step of the self-test, such as a build (default: %(default)g)",
    )
    parser.add_argument(
        "--unit",
        default="weightd.service",
        metavar="NAME",
        help='service whose environment, user and devices to check, if systemd has it; "" for this shell '
        "(default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from weightd_daemon.doctor import cli  # noqa: PLC0415 - importing it would add a fifth to the daemon's start time

    return cli.run(options)


def _parse_device(text: str) -> int:
    card = card_of(text)
    if card is None:
        raise argparse.ArgumentTypeError(f"expected ascend:N, got {text!r}")
    return card


def _parse_devices(text: str) -> tuple[int, ...]:
    devices = tuple(_parse_device(each.strip()) for each in text.split(","))
    if len(set(devices)) < len(devices):
        raise argparse.ArgumentTypeError(f"expected each device once, got {text!r}")
    return devices


def _parse_selftest(text: str) -> SelfTestSetting:
    from weightd_daemon.config import selftest as selftest_config  # noqa: PLC0415 - for the same reason
    from weightd_protocol.schema import FieldError  # noqa: PLC0415

    try:
        return selftest_config.parse_text(text)
    except FieldError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parse_tolerance(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return share


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"expected seconds, got {text!r}")
    return seconds
