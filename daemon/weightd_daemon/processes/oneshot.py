"""Processes that do one thing and answer on a pipe: their logs are for people."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from weightd_daemon.platform import processes
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.processes.process_table import ProcessTable

# No answer is longer, nor fills a pipe.
_MAX_RESULT_BYTES = 65536

OneshotResult = Mapping[str, Any]
"""What a helper has answered; nothing where it has not."""


def run(
    process_table: ProcessTable,
    name: str,
    argv: Sequence[str],
    log: Path,
    on_result: Callable[[OneshotResult, ExitCause], None],
    *,
    stdin_data: bytes = b"",
) -> None:
    """Start a helper, whose stdout is the pipe; `on_result` what it has answered, and how it has ended, once it has.

    Args:
        process_table: watches the helper.
        name: of the helper.
        argv: its command, which every user of the host may read.
        log: where its stderr goes.
        on_result: is called once the helper has ended.
        stdin_data: what the helper reads from stdin.

    Raises:
        OSError: it cannot be started.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        process = processes.start(argv, log, stdout=writer, stdin_data=stdin_data)
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    process_table.add(name, process, functools.partial(_on_exit, process_table, name, reader, on_result))


def _on_exit(
    process_table: ProcessTable, name: str, reader: int, on_result: Callable[[OneshotResult, ExitCause], None]
) -> None:
    exit_cause = process_table.reap(name)
    result: OneshotResult = {}
    # Nothing, and no end of it: it has left somebody behind who still could say something.
    with contextlib.suppress(BlockingIOError):
        result = _parse_result(os.read(reader, _MAX_RESULT_BYTES))
    os.close(reader)
    on_result(result, exit_cause)


def _parse_result(content: bytes) -> OneshotResult:
    try:
        result = cast("object", json.loads(content))
    except ValueError:
        return {}
    return cast("OneshotResult", result) if isinstance(result, dict) else {}
