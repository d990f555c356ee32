"""Probe of a card's memory and kind: ``python -m weightd_worker.device_probe --device ascend:0``.

The probe prints one line of JSON to stdout, which is a pipe to the daemon: total and free bytes of the card's memory
(total_bytes, free_bytes), the kind of card (soc), and the number of cards that the process sees (devices). After an
error, it prints {"error": ...} and exits with status 69. It runs in a separate process because it keeps the card open
until it exits. The memory that the probe itself takes on the card counts as used.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from typing import Any, Dict

from weightd_common import process_start
from weightd_common.process_start import die_with_parent
from weightd_worker import exit_codes
from weightd_worker.engines.engine import BuildError, BuildSettings
from weightd_worker.engines.mindspore_lite.acl import Acl, AclError

# Seconds after which the kernel ends the probe. Importing CANN alone may take long on a busy host.
TIMEOUT_S = 120


def main() -> int:
    """Print the line of JSON, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m weightd_worker.device_probe", description="Reports a card's name and memory."
    )
    parser.add_argument("--device", required=True, help="ascend:N")
    parser.add_argument(
        "--parent", type=int, default=0, help="pid of the parent; this process exits when the parent exits"
    )
    options = parser.parse_args()
    device: str = options.device
    # With --parent, the daemon has started the probe and handles Ctrl-C, so the probe ignores SIGINT.
    process_start.reset_signals(*([signal.SIGINT] if options.parent else []))
    if options.parent:
        die_with_parent(options.parent)
    # If the driver hangs, the kernel ends this process by SIGALRM.
    signal.alarm(TIMEOUT_S)
    with os.fdopen(os.dup(1), "w", encoding="ascii") as out:
        # Libraries may print to stdout. Redirect their text to stderr, so that the pipe gets only the line of JSON.
        os.dup2(2, 1)
        try:
            report = probe(device)
            status = exit_codes.OK
        except Exception as error:  # noqa: BLE001 - an import runs foreign code: it can fail in any way
            text = str(error) if isinstance(error, (AclError, BuildError)) else f"{type(error).__name__}: {error}"
            report, status = {"error": text}, exit_codes.NO_ENGINE
        out.write(json.dumps(report) + "\n")
    return status


def probe(device: str) -> Dict[str, Any]:
    """Return the values that `main` prints as JSON: the card's memory and kind, and the number of cards.

    Raises:
        BuildError: the device is not a card, or this process sees no card with this number.
        AclError: the card cannot be queried.
    """
    card = BuildSettings(1, device).card
    if card is None:
        raise BuildError("device: expected ascend:N, got 'cpu'")
    # Import mindspore_lite before libascendcl is loaded. The import makes CANN's libraries available even if the
    # environment variables for CANN are not set.
    import mindspore_lite  # noqa: F401, PLC0415  # pyright: ignore[reportUnusedImport]

    acl = Acl()
    acl.initialize()
    devices = acl.device_count()
    if card >= devices:
        raise BuildError(f"device: there is no card {card}; this process sees {devices}, counted from 0")
    acl.set_device(card)
    memory = acl.memory()
    return {
        "total_bytes": memory.total_bytes,
        "free_bytes": memory.free_bytes,
        "soc": acl.soc_name(),
        "devices": devices,
    }


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit without running the exit handlers of native libraries, because some of these handlers crash. The kernel frees
    # all resources.
    os._exit(status)
