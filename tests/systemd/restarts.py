"""How long a start takes, and a restart as clients see it: `python -m tests.systemd.restarts [COUNT]`.

Prints how long `systemctl start` takes until the demo's model (129 MiB, four workers) serves, from one worker on.

Prints the longest time between two answers of a client, as median and maximum over all restarts and clients, for
`systemctl restart` and for a daemon that is killed; beside it the same of as many times without a restart.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.demo import model as digits

from . import materials, units
from .manager import Manager
from .service import Weightd, begun, ended
from .test_restart import CLIENTS, by_sigkill, by_systemctl

DIGITS = f"{materials.HOME}/digits.onnx"

# Before and after the restart.
SETTLE_S = 0.5


def gaps(weightd: Weightd, replace: Callable[[Weightd], None]) -> list[float]:
    """Return the longest gap that each client saw around one restart, in seconds."""
    clients = [begun(weightd.client("load", materials.QUESTIONS)) for _ in range(CLIENTS)]
    time.sleep(SETTLE_S)
    replace(weightd)
    time.sleep(SETTLE_S)
    reports = [ended(each) for each in clients]
    assert not any(each["wrong"] for each in reports), reports
    return [each["gap"] for each in reports]


def starts(weightd: Weightd, count: int) -> list[float]:
    """Return how long each start has taken, in seconds."""
    weightd.configure({"digits": {"path": DIGITS, "workers": 4, "required": True}})
    seen: list[float] = []
    for _ in range(count):
        weightd.stop()
        begin = time.perf_counter()
        weightd.start()
        seen.append(time.perf_counter() - begin)
    return seen


def main(count: int) -> None:
    """Measure and print."""
    ways: dict[str, Callable[[Weightd], None]] = {
        "systemctl restart": by_systemctl,
        "SIGKILL": by_sigkill,
        "nothing": lambda _: time.sleep(SETTLE_S),
    }
    with Manager() as manager, tempfile.TemporaryDirectory() as scratch:
        units.install(manager)
        materials.lay_out(manager, Path(scratch))
        weightd = Weightd(manager)
        weightd.reset()
        weightd.drop_in("[Unit]", "StartLimitBurst=1000")
        digits.write(manager.path(DIGITS))
        manager.path(DIGITS).chmod(0o644)
        seen = starts(weightd, count)
        print(
            f"{'systemctl start':18} x {count}: p50 {statistics.median(seen):6.2f} s, max {max(seen):7.2f} s",
            flush=True,
        )
        weightd.reset()
        weightd.drop_in("[Unit]", "StartLimitBurst=1000")
        weightd.start()
        weightd.wait_for_workers()
        for name, replace in ways.items():
            seen = [1e3 * each for _ in range(count) for each in gaps(weightd, replace)]
            print(f"{name:18} x {count}: p50 {statistics.median(seen):6.0f} ms, max {max(seen):6.0f} ms", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
