"""Changes to the file system inside the machine of manager.py: files, bind mounts, Python and weightd."""

from __future__ import annotations

import sys
from pathlib import Path

from testkit import mindir

HOME = "/opt/weightd"
PYTHON = f"{HOME}/venv/bin/python"
MSLITE_PYTHON = f"{HOME}/venv-mslite/bin/python"
PACKAGES = ("client", "common", "ctl", "daemon", "gateway", "worker", "protocol")
DIRECTORIES = (*PACKAGES, "systemd", "tests")
SOURCES = (*PACKAGES, "tests/support")
ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "SYSTEMD_PAGER": "", "SYSTEMD_COLORS": "0"}

UNITS = Path("/lib/systemd/system")
TARGETS = ("sysinit", "sockets", "basic", "local-fs", "timers", "multi-user")
# The only boot-time unit of the host that the tests start.
WANTED = "systemd-journald"

TARGET = """\
[Unit]
Requires=basic.target
After=basic.target
"""
JOURNALD = """\
[Journal]
Storage=volatile
RateLimitBurst=0
ReadKMsg=no
Audit=no
"""


def write(scratch: Path) -> None:
    """Write the files that boot.sh needs into `scratch`."""
    for each in ("root", "memory", "files", "var-cache"):
        (scratch / each).mkdir()
    files = _Files(scratch / "files")
    files.write("run/systemd/system/weightd-tests.target", TARGET)
    files.write("run/systemd/journald.conf.d/weightd-tests.conf", JOURNALD)
    for unit in _booted():
        files.link(f"run/systemd/system/{unit}", "/dev/null")
    files.write("etc/fstab", "")
    binds = {"/var/cache": scratch / "var-cache"}
    # Not the repository itself: only its owner may be able to enter it, as after `git clone . $(mktemp -d)`.
    binds.update({f"{HOME}/source/{each}": mindir.REPOSITORY / each for each in DIRECTORIES})
    _python(files, binds, "", Path(sys.executable))
    mslite = mindir.REPOSITORY / ".venv-mslite/bin/python"
    if mslite.exists():
        _python(files, binds, "-mslite", mslite)
    for name, module in (("weightd", "weightd_daemon"), ("weightctl", "weightctl")):
        command = f"{HOME}/venv/bin/{name}"
        files.write(command.lstrip("/"), f'#!/bin/sh\nexec {PYTHON} -m {module} "$@"\n', 0o755)
        files.link(f"usr/bin/{name}", command)
    files.write("etc/ld.so.conf.d/weightd-tests.conf", f"{HOME}/python/lib\n{HOME}/python-mslite/lib\n")
    (scratch / "binds").write_text("".join(f"{each} {target}\n" for target, each in binds.items()), "utf-8")


def _booted() -> set[str]:
    wanted = {each.name for target in TARGETS for each in UNITS.glob(f"{target}.target.wants/*")}
    return {each for each in wanted if not each.startswith(WANTED) and not each.endswith(".target")}


def _python(files: _Files, binds: dict[str, Path], suffix: str, python: Path) -> None:
    """Create a virtual environment whose parts are bind-mounted where every unit can see them."""
    real = python.resolve()
    site = next(python.parent.parent.glob("lib/python*/site-packages"))
    home = f"{HOME}/python{suffix}"
    binds[home] = real.parent.parent
    binds[f"{HOME}/site{suffix}"] = site
    venv = f"{HOME}/venv{suffix}".lstrip("/")
    files.write(f"{venv}/pyvenv.cfg", f"home = {home}/bin\ninclude-system-site-packages = false\n")
    files.link(f"{venv}/bin/python", f"{home}/bin/{real.name}")
    paths = [*(f"{HOME}/source/{each}" for each in SOURCES), f"{HOME}/site{suffix}"]
    files.write(f"{venv}/lib/{site.parent.name}/site-packages/weightd.pth", "".join(f"{each}\n" for each in paths))


class _Files:
    """A directory tree that boot.sh copies over the root."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        outside = self._made(path)
        outside.write_text(text, "utf-8")
        outside.chmod(mode)

    def link(self, path: str, target: str) -> None:
        self._made(path).symlink_to(target)

    def _made(self, path: str) -> Path:
        outside = self._root / path
        outside.parent.mkdir(parents=True, exist_ok=True)
        return outside
