"""Processes with other uids and groups that send requests to a daemon on behalf of a test.

The uids need no user names, as kernel and daemon use only the numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.connection import Pipe
from typing import Any, Callable, Sequence

# Group whose members may connect to the sockets of a `Service`.
CLIENTS_GID = 61000

ALICE, BOB, CAROL, DAVE = 61001, 61002, 61003, 61004

END_LIMIT_S = 20.0
_ANSWER_LIMIT_S = 120.0

_HOW = "processes of other users can be started by root only"


class UserError(RuntimeError):
    """Error: the process of a user has exited or does not reply."""


def need_other_users() -> None:
    """Skip the test if this process cannot change its uid; fail it if CI=true."""
    import pytest  # the benchmarks do not need pytest

    if os.getuid() == 0:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(_HOW)
    pytest.skip(_HOW)


class User:
    """A process of another user, which executes one order at a time within the block.

        with User(ALICE) as alice:
            alice.connect(service.address)
            alice.ask("infer", "mlp", {"x": x})

    A function to run is importable, takes `users_child.ProcessContext` as first argument, and has picklable arguments
    and results.

    Args:
        uid: uid of the process; its gid has the same number.
        groups: supplementary groups.
        imports: modules that the process imports while it is still root.
    """

    def __init__(self, uid: int, *, groups: Sequence[int] = (CLIENTS_GID,), imports: Sequence[str] = ()) -> None:
        self.uid = uid
        self._groups = groups
        self._imports = imports

    def __enter__(self) -> User:
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-m", "testkit.users_child", str(theirs.fileno()), str(self.uid)]
        command += [",".join(map(str, self._groups)), *self._imports]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=env, pass_fds=[theirs.fileno()], cwd="/"
        )
        theirs.close()
        self.pid: int = self._process.pid
        try:
            self.wait_for_report()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # The process sees the end of the pipe.
        self._pipe.close()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def connect(self, address: str, **options: Any) -> None:
        """Replace the client of the process by a client of `address`; `options` are keyword arguments of `Client`.

        Raises:
            RequestError: the connection failed.
        """
        self._order("connect", address, options)
        self._result()

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a method of the client.

        Raises:
            RequestError: the error of the request.
        """
        self._order("ask", method, args, kwargs)
        return self._result()

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in the process, and return the result."""
        self.begin(function, *args)
        return self._result()

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """Start a function in the process."""
        self._order("do", function, args)

    def wait_for_report(self) -> Any:
        """Return the next report of the running function."""
        kind, report = self._receive()
        if kind == "error":
            raise report
        assert kind == "report", kind
        return report

    def end(self) -> Any:
        """Stop the running function, and return its result."""
        self._order("stop")
        return self._result()

    def _order(self, *order: Any) -> None:
        try:
            self._pipe.send(order)
        except OSError:
            raise self._dead() from None

    def _result(self) -> Any:
        while True:
            kind, value = self._receive()
            if kind == "error":
                raise value
            if kind == "result":
                return value

    def _receive(self) -> Any:
        if not self._pipe.poll(_ANSWER_LIMIT_S):
            raise UserError(f"the process of user {self.uid} did not reply within {_ANSWER_LIMIT_S:g} s")
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            raise self._dead() from None

    def _dead(self) -> UserError:
        return UserError(f"the process of user {self.uid} died with status {self._process.wait(END_LIMIT_S)}")
