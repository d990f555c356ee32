"""Pages of the documentation: sections, code blocks, links, and execution of their commands."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import NamedTuple

from testkit.mindir import REPOSITORY

DOCS = REPOSITORY / "docs"

_LIMIT_S = 60
_END_LIMIT_S = 30


class Block(NamedTuple):
    """A code block; the language is "" for output."""

    language: str
    code: str


def sections(page: str) -> dict[str, str]:
    """Return the sections by heading, for headings of the second level."""
    parts = re.split(r"^## (.*)\n", (DOCS / page).read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def blocks(text: str) -> list[Block]:
    """Return the code blocks of a text, in order."""
    return [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]


def promised_output(code: str) -> list[str]:
    """Return the output that the comments behind calls of print promise."""
    return re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)


def run(programs: Mapping[str, str], directory: Path, env: Mapping[str, str]) -> dict[str, list[str]]:
    """Run the programs one after another in one process; return the lines that each prints.

    Warnings are errors. The cells of a notebook, separated by `CELL`, share names and event loop, and may use await.
    """
    given, results = directory / "programs.json", directory / "printed.json"
    given.write_text(json.dumps(programs), encoding="utf-8")
    runner = Path(__file__).with_name("runner.py")
    left = output([sys.executable, "-W", "error", str(runner), str(given), str(results)], directory, env)
    # Output at the exit of the process reports objects that were not closed.
    assert left == []
    printed: dict[str, list[str]] = json.loads(results.read_text("utf-8"))
    return printed


def daemon_environment(directory: Path, socket: Path) -> dict[str, str]:
    """Return the environment of commands that start a daemon with all its files in `directory`, and of its clients."""
    for name in ("run", "cache"):
        (directory / name).mkdir(mode=0o700)
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "WEIGHTD_SOCKET": str(socket),
        "RUNTIME_DIRECTORY": str(directory / "run"),
        "CACHE_DIRECTORY": str(directory / "cache"),
    }


def output(command: list[str], directory: Path, env: Mapping[str, str], status: int = 0) -> list[str]:
    """Run a command; return the lines of its output and then of its errors."""
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return (done.stdout + done.stderr).splitlines()


@contextlib.contextmanager
def served(command: str, directory: Path, env: Mapping[str, str]) -> Generator[None, None, None]:
    """Run a command that serves in the foreground; end it by Ctrl-C."""
    with subprocess.Popen(
        ["bash", "-ec", f"exec {command}"], cwd=directory, env={**os.environ, **env}, stderr=subprocess.PIPE, text=True
    ) as daemon:
        assert daemon.stderr
        try:
            assert next(line for line in daemon.stderr if "listens on" in line)
            yield
            assert daemon.poll() is None
        finally:
            daemon.send_signal(signal.SIGINT)
            log = daemon.communicate(timeout=_END_LIMIT_S)[1]
    assert daemon.returncode == 0, log


def broken_links(page: str) -> list[str]:
    """Return the links to missing files and headings of the repository."""
    path = DOCS / page
    broken: list[str] = []
    for file, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", path.read_text("utf-8")):
        target = path.parent / file if file else path
        if not target.is_file() or (heading and heading not in _headings(target.read_text("utf-8"))):
            broken.append(f"{file}#{heading}")
    return broken


def long_lines(page: str) -> list[str]:
    """Return lines longer than 120 characters, except in tables."""
    lines = (DOCS / page).read_text("utf-8").splitlines()
    return [line for line in lines if len(line) > 120 and not line.startswith("|")]


def _headings(text: str) -> set[str]:
    lines = [line for line in text.splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in lines}
