"""Processes that do one thing and answer on a pipe: their logs are for people."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from weightd.daemon.children.running import Running
from weightd.daemon.host import processes
from weightd.daemon.host.ends import End

# No answer is longer, nor fills a pipe.
_ANSWER_BYTES = 65536

Answer = Mapping[str, Any]
"""What a helper has answered; nothing where it has not."""


def ask(
    running: Running,
    name: str,
    argv: Sequence[str],
    log: Path,
    tell: Callable[[Answer, End], None],
    *,
    order: bytes = b"",
) -> None:
    """Start a helper, whose stdout is the pipe; `tell` what it has answered, and how it has ended, once it has.

    Args:
        running: watches the helper.
        name: of the helper.
        argv: its command, which every user of the host may read.
        log: where its stderr goes.
        tell: is called once the helper has ended.
        order: what the helper reads from stdin.

    Raises:
        OSError: it cannot be started.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        process = processes.start(argv, log, stdout=writer, order=order)
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    running.add(name, process, functools.partial(_on_exit, running, name, reader, tell))


def _on_exit(running: Running, name: str, reader: int, tell: Callable[[Answer, End], None]) -> None:
    end = running.reap(name)
    answer: Answer = {}
    # Nothing, and no end of it: it has left somebody behind who still could say something.
    with contextlib.suppress(BlockingIOError):
        answer = _decoded(os.read(reader, _ANSWER_BYTES))
    os.close(reader)
    tell(answer, end)


def _decoded(content: bytes) -> Answer:
    try:
        answer = cast("object", json.loads(content))
    except ValueError:
        return {}
    return cast("Answer", answer) if isinstance(answer, dict) else {}
