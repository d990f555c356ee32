"""Program that boots systemd in new namespaces, and removes everything at the end of its standard input.

Takes the directory that image.py has filled. The program is a separate process in a new session, so that it cleans up
even if the tests end by Ctrl-C or SIGKILL. It writes the pid of systemd, or the reason why systemd did not start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

BOOT = Path(__file__).with_name("boot.sh")
LIMIT_S = 10


class CannotBoot(Exception):
    """systemd did not start; the text has the reason."""


def main(scratch: Path) -> int:
    """Boot, wait for the end of standard input, clean up."""
    signal.signal(signal.SIGTERM, _end)
    try:
        with _removed(scratch), _cgroups(scratch):
            _boot(scratch)
    except (OSError, CannotBoot) as error:
        print(error)
        return 1
    return 0


def _boot(scratch: Path) -> None:
    console = scratch / "console"
    with console.open("wb") as output:
        command = ["sh", str(BOOT), "enter", str(scratch)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        pid = _manager(process)
        if pid is None:
            raise CannotBoot(console.read_text("utf-8", "replace"))
        print(pid, flush=True)
        sys.stdin.read()
    finally:
        process.kill()
        process.wait()


def _end(*_: object) -> None:
    sys.exit(1)


def _manager(process: subprocess.Popen[bytes]) -> int | None:
    """Return the pid of process 1 inside, the only child of `unshare`; None if systemd has not started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # a process has just exited
            for pid in children.read_text("ascii").split():
                if Path(f"/proc/{pid}/comm").read_text("utf-8").strip() == "systemd":
                    return int(pid)
        time.sleep(0.01)
    return None


@contextlib.contextmanager
def _removed(scratch: Path) -> Generator[None, None, None]:
    try:
        yield
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _cgroups(scratch: Path) -> Generator[None, None, None]:
    """Create a cgroup below this process's cgroup in each hierarchy; finally remove it with its contents."""
    groups = [each / scratch.name for each in _own_groups()]
    for each in groups:
        each.mkdir()
    (scratch / "name").write_text(scratch.name, "utf-8")
    (scratch / "cgroups").write_text("".join(f"{each}\n" for each in groups), "utf-8")
    try:
        yield
    finally:
        for each in groups:
            _remove(each)


def _own_groups() -> Iterator[Path]:
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text("utf-8").splitlines()]
    for line in Path("/proc/self/cgroup").read_text("utf-8").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "cpuset":  # a new cpuset cgroup cannot have processes
            continue
        kind = "cgroup" if controllers else "cgroup2"
        wanted = set(filter(None, controllers.split(",")))
        for fields in mounts:
            dash = fields.index("-")
            if fields[dash + 1] == kind and wanted <= set(fields[dash + 3].split(",")):
                yield Path(fields[4], os.path.relpath(group, fields[3]))
                break
        else:
            raise CannotBoot(f"no mount of the cgroup hierarchy {controllers or 'cgroup2'}")


def _remove(group: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    for directory, _, _ in os.walk(group, topdown=False):
        while True:  # the last process may still be exiting
            try:
                Path(directory).rmdir()
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    print(f"{directory}: {error.strerror}", file=sys.stderr)
                    break
            time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
