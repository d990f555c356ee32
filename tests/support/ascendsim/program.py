"""Programs that use the simulated library in separate processes, controlled by a test.

They are forked from a process that has imported all modules, so that each starts within milliseconds::

    with ProgramForkServer() as server:
        holder, worker = server.start(host), server.start(host)
        handle = holder.do("build(path, pids=pids)", path=path, pids=str(worker.do("pid()")))
        worker.do("build(path, handle=handle)", path=path, handle=handle)
        worker.do("predict(x)", x=x)
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, List, Mapping, Optional, Sequence

from ascendsim.host import Host, environment

_CHILD = Path(__file__).resolve().with_name("program_child.py")
_LIMIT_S = 60
_ERROR = re.compile(r"\[ERROR\] ME\(\d+,[0-9a-f]+,\w+\):\S+ \[[^\]]+:\d+\] \w+\] (?P<text>.*)")


class ProgramError(Exception):
    """Error raised by the code of a program: the name of its class in `kind`, its text in `text`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class Died(Exception):
    """Error: the program exited without an answer. The text has its status, negative for a signal."""


class ProgramForkServer:
    """A fork server of programs, which exit at the end of the block.

    Args:
        imported: further modules that each program finds imported.
    """

    def __init__(self, *imported: str) -> None:
        self._imported = imported

    def __enter__(self) -> ProgramForkServer:
        self._directory = tempfile.TemporaryDirectory(prefix="asim-", dir="/tmp")
        self._programs: List[Program] = []
        path = os.pathsep.join([str(_CHILD.with_name("path")), *filter(None, sys.path)])
        self._process = subprocess.Popen(
            [sys.executable, str(_CHILD), *self._imported],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        )
        self.pid = self._process.pid
        return self

    def __exit__(self, *_: object) -> None:
        for program in self._programs:
            program.kill()
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(_LIMIT_S)
        self._process.stdout.close()
        self._directory.cleanup()

    def start(self, host: Host, pid: int = 0, **variables: str) -> Program:
        """Start a program on this host. `variables` are added to its environment; for `pid` see `environment`."""
        number = str(len(self._programs))
        address = str(Path(self._directory.name) / number)
        log = Path(f"{address}.log")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(1)
            listener.settimeout(_LIMIT_S)
            os_pid = self.ask((["", address], str(log), {**environment(host, pid), **variables}))
            connection = listener.accept()[0]
        program = Program(self, os_pid, connection, log)
        self._programs.append(program)
        return program

    def popen(
        self, command: List[str], log: Path, variables: Mapping[str, str], arguments: Sequence[str] = ()
    ) -> Forked:
        """Run [python, "-m", module, ...] as `subprocess.Popen` would, but forked; its output goes to the log.

        The program reads `arguments` from stdin, as a JSON list.
        """
        return Forked(self, self.ask((command[2:], str(log), dict(variables), json.dumps([*arguments]))))

    def ask(self, request: object) -> int:
        """Send a request to the fork server; return a pid for a program's arguments, or the exit status for a pid."""
        assert self._process.stdin
        assert self._process.stdout
        pickle.dump(request, self._process.stdin, protocol=4)
        self._process.stdin.flush()
        answer: int = pickle.load(self._process.stdout)
        return answer


class Forked:
    """A forked process with a part of Popen's methods. `pid` is its pid for the kernel, not the driver's."""

    def __init__(self, fork_server: ProgramForkServer, pid: int) -> None:
        self.pid = pid
        self._fork_server = fork_server
        self._status: Optional[int] = None

    def wait(self, _limit: float = 0) -> int:
        """Wait until the process exits; return its status, negative for a signal."""
        if self._status is None:
            self._status = self._fork_server.ask(self.pid)
        return self._status

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Kill the process and wait until it exits."""
        if self._status is None:
            os.kill(self.pid, number)
        return self.wait()


class Program(Forked):
    """A program. Its code "pid()" returns the driver's pid of the process."""

    def __init__(self, fork_server: ProgramForkServer, pid: int, connection: socket.socket, log: Path) -> None:
        super().__init__(fork_server, pid)
        self._connection = connection
        self._stream = connection.makefile("rwb")
        self._log = log

    def do(self, code: str, **values: Any) -> Any:
        """Run code with these values as names; return the value of its last line. See `program_child.Library`."""
        self.begin(code, **values)
        return self.result()

    def begin(self, code: str, **values: Any) -> None:
        """Start code in the program, without waiting."""
        pickle.dump((code, values), self._stream, protocol=4)
        self._stream.flush()

    def has_answered(self, timeout: float = 0) -> bool:
        """Return whether `result` would return at once."""
        return bool(select.select([self._connection], [], [], timeout)[0])

    def result(self) -> Any:
        """Return the value of the running code, or raise `ProgramError` or `Died`."""
        try:
            error, value = pickle.load(self._stream)
        except (EOFError, ConnectionResetError):
            raise Died(f"exit status {self.wait()}") from None
        if error is not None:
            raise ProgramError(*error)
        return value

    def refusal(self, code: str, **values: Any) -> ProgramError:
        """Return the error that this code raises."""
        try:
            value = self.do(code, **values)
        except ProgramError as error:
            return error
        raise AssertionError(f"expected an error, got {value!r}")

    def log(self) -> str:
        """The text that the program has written to stderr."""
        return self._log.read_text(encoding="utf-8") if self._log.exists() else ""

    def errors(self) -> List[str]:
        """The texts of the errors in its native log, in order."""
        return [match.group("text") for match in map(_ERROR.match, self.log().splitlines()) if match]

    def wait(self, _limit: float = 0) -> int:
        """Let an idle program exit; wait until it has, and return its status, negative for a signal."""
        with contextlib.suppress(OSError):
            self._stream.close()
        self._connection.close()
        return super().wait()
