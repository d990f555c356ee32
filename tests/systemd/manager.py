"""A real systemd as process 1 of new namespaces, over a temporary copy of this machine's file system.

    with Manager() as manager:
        manager.write("/etc/systemd/system/demo.service", unit)
        manager.systemctl("start", "demo.service")

Changes inside are not visible outside, and nothing remains after the block: see boot.sh and janitor.py. Inside,
/etc/systemd/system is empty, /var/cache is on a disk (a page store needs one), and other writable directories are in
memory. Python and weightd are below /opt/weightd, because units with ProtectHome= and PrivateTmp= see neither /home nor
/tmp. `python` and `mslite_python` are the interpreters there; /usr/bin/weightd and /usr/bin/weightctl are the commands.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from testkit import mindir
from testkit.waiting import until

from . import image

JANITOR = Path(__file__).with_name("janitor.py")
NEEDED = ("nsenter", "unshare", "setpriv", "pivot_root", "ldconfig")
SYSTEMD = Path("/lib/systemd/systemd")
LIMIT_S = 60.0
SCRATCH_PREFIX = "weightd-systemd-"


class CannotBoot(RuntimeError):
    """systemd cannot boot on this machine; the text has the reason."""


class CommandFailed(AssertionError):
    """A command inside exited with a status other than 0."""


class Manager:
    """One booted systemd. See the module's docstring."""

    python = image.PYTHON
    mslite_python = image.MSLITE_PYTHON

    def __enter__(self) -> Manager:
        _check()
        build = mindir.REPOSITORY / "build"
        build.mkdir(exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-", dir=build))
        scratch.chmod(0o755)
        image.write(scratch)
        # The janitor has a separate session, so that Ctrl-C does not reach it, and cleans up after the tests.
        self._janitor = subprocess.Popen(
            [sys.executable, "-I", str(JANITOR), str(scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._janitor.stdout
        first = self._janitor.stdout.readline()
        if not first.strip().isdecimal():
            reason = first + self._janitor.stdout.read()
            self._end()
            raise CannotBoot(reason.strip() or "see above")
        self.pid = int(first)
        self.root = Path(f"/proc/{self.pid}/root")
        try:
            self._boot()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        assert self._janitor.stdin
        assert self._janitor.stdout
        self._janitor.stdin.close()
        self._janitor.wait(LIMIT_S)
        self._janitor.stdout.close()

    def _boot(self) -> None:
        is_active = ["systemctl", "is-active", "weightd-tests.target"]
        until(lambda: self.try_run(is_active).returncode == 0, "systemd boots", LIMIT_S)

    def command(self, argv: Sequence[str], uid: int = 0, gid: int = 0, groups: Sequence[int] = ()) -> list[str]:
        """Return the command line that runs `argv` inside as this user."""
        enter = ["nsenter", "--target", str(self.pid), "--all", "--root", "--wd"]
        if (uid, gid, *groups) != (0, 0):
            more = ["--groups", ",".join(map(str, groups))] if groups else ["--clear-groups"]
            enter += ["setpriv", "--reuid", str(uid), "--regid", str(gid), *more, "--inh-caps=-all"]
        return [*enter, *argv]

    def try_run(
        self, argv: Sequence[str], uid: int = 0, gid: int = 0, groups: Sequence[int] = (), limit: float = LIMIT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside; return its status and output."""
        command = self.command(argv, uid, gid, groups)
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit, check=False, env=image.ENV
        )

    def run(
        self, argv: Sequence[str], uid: int = 0, gid: int = 0, groups: Sequence[int] = (), limit: float = LIMIT_S
    ) -> str:
        """Run a command inside, which must succeed; return its output."""
        done = self.try_run(argv, uid, gid, groups, limit)
        if done.returncode != 0:
            raise CommandFailed(f"{' '.join(argv)} exited with status {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def popen(
        self, argv: Sequence[str], uid: int = 0, gid: int = 0, groups: Sequence[int] = ()
    ) -> subprocess.Popen[str]:
        """Start a command inside, with pipes; the caller waits for it."""
        return subprocess.Popen(
            self.command(argv, uid, gid, groups),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=image.ENV,
        )

    def systemctl(self, *arguments: str, limit: float = LIMIT_S) -> str:
        """Run systemctl, which must succeed; return its output."""
        return self.run(["systemctl", *arguments], limit=limit)

    def show(self, unit: str, name: str) -> str:
        """Return one property of a unit."""
        return self.systemctl("show", "--value", "--property", name, unit).strip()

    def shows(self, unit: str, *names: str) -> Mapping[str, str]:
        """Return several properties of a unit, read at the same time."""
        lines = self.systemctl("show", "--property", ",".join(names), unit).splitlines()
        return dict(line.split("=", 1) for line in lines)

    def journal(self, unit: str, *arguments: str) -> str:
        """Return the journal of a unit, including systemd's messages about it."""
        self.run(["journalctl", "--sync"])
        return self.run(["journalctl", "--unit", unit, "--output", "cat", "--no-pager", *arguments])

    def records(self, unit: str) -> list[Mapping[str, str]]:
        """Return the journal of a unit with all fields."""
        return [json.loads(line) for line in self.journal(unit, "--output", "json").splitlines()]

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file inside, as root."""
        outside = self.path(path)
        outside.parent.mkdir(parents=True, exist_ok=True)
        outside.write_text(text, encoding="utf-8")
        outside.chmod(mode)

    def path(self, path: str) -> Path:
        """Return the path outside of a path inside; symbolic links with absolute targets do not work."""
        return self.root / path.lstrip("/")

    def pids(self, unit: str) -> list[int]:
        """Return the processes in the cgroup of a unit, by their pids inside."""
        group = self.show(unit, "ControlGroup")
        if not group:
            return []
        # systemd tracks processes in a separate hierarchy, or in the only one.
        named = "systemd" if self.path("/sys/fs/cgroup/systemd").exists() else ""
        # Read inside, because the kernel shows pids in the PID namespace of the reading process.
        command = ["find", f"/sys/fs/cgroup/{named}{group}", "-name", "cgroup.procs", "-exec", "cat", "{}", "+"]
        return sorted(set(map(int, self.try_run(command).stdout.split())))

    def kill(self, pid: int, signal: int) -> None:
        """Send a signal to a process, by its pid inside."""
        self.run(["kill", f"-{signal}", str(pid)])

    def proc(self, pid: int, name: str) -> str:
        """Return a file of /proc/PID, by the pid inside; empty if there is no such process."""
        try:
            return (self.root / "proc" / str(pid) / name).read_text("utf-8", "replace").replace("\0", " ").strip()
        except (FileNotFoundError, ProcessLookupError):
            return ""


def _check() -> None:
    if os.getuid() != 0:
        raise CannotBoot("only root can create the namespaces and cgroups of a system manager")
    if not SYSTEMD.exists():
        raise CannotBoot("systemd is not installed; on Debian: apt install systemd")
    missing = [each for each in NEEDED if shutil.which(each) is None]
    if missing:
        raise CannotBoot(f"not installed: {', '.join(missing)}; on Debian: apt install util-linux libc-bin")
