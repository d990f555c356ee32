"""What a card says of itself: ``python -m weightd_worker.device_probe --device ascend:0``.

Answers on stdout, a pipe, with a line of JSON: total_bytes and free_bytes of the card's memory, its kind (soc), and how
many cards this process sees (devices); or {"error": ...}, with exit status 69. A process of its own, for it takes a
place on the card as long as it lives, and its own context is part of what is not free.
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

# The import of CANN alone takes many seconds on a busy host.
TIMEOUT_S = 120


def main() -> int:
    """Print the line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m weightd_worker.device_probe", description="What a card says of itself."
    )
    parser.add_argument("--device", required=True, help="ascend:N")
    parser.add_argument("--parent", type=int, default=0, help="pid of the process without which this one ends")
    options = parser.parse_args()
    device: str = options.device
    # Ctrl-C is the daemon's to act on, if there is one.
    process_start.reset_signals(*([signal.SIGINT] if options.parent else []))
    if options.parent:
        die_with_parent(options.parent)
    # A driver that hangs: the kernel ends this process, whatever it is in.
    signal.alarm(TIMEOUT_S)
    with os.fdopen(os.dup(1), "w", encoding="ascii") as out:
        # A library may greet on stdout; that belongs to the log.
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
    """Return what the card says.

    Raises:
        BuildError: this is no card.
        AclError: it cannot be asked.
    """
    card = BuildSettings(1, device).card
    if card is None:
        raise BuildError("device: expected ascend:N, got 'cpu'")
    # Before libascendcl: it brings the libraries of CANN with it, where the environment does not.
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
    # Native libraries have been seen to crash in their exit handlers; the kernel cleans up better.
    os._exit(status)
