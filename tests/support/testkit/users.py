"""Processes of other users, with their own uids and groups, that ask a daemon as they are told.

Their numbers need no names: the kernel tells them apart, and so does the daemon.
"""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.connection import Pipe
from typing import Any, Callable, Sequence

# Whom a service lets connect to its sockets, see `Service`.
CLIENTS_GID = 61000

ALICE, BOB, CAROL, DAVE = 61001, 61002, 61003, 61004

END_LIMIT_S = 20.0
_ANSWER_LIMIT_S = 120.0

_HOW = "processes of other users can be started by root only"


class UserError(RuntimeError):
    """A user's process has died, or says nothing."""


def need_other_users() -> None:
    """Skip the test where no process can become another user's; where CI=true, that is a failure."""
    import pytest  # the benchmarks do without it

    if os.getuid() == 0:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(_HOW)
    pytest.skip(_HOW)


class User:
    """A process of a user. Within the block it does what it is ordered to, one thing at a time.

        with User(ALICE) as alice:
            alice.connect(service.address)
            alice.ask("infer", "mlp", {"x": x})

    A function that it is to run is named by where it can be imported from, takes `users_child.ProcessContext` first,
    and what it takes and gives can be pickled.

    Args:
        uid: whose it is; its group has the same number.
        groups: further ones of it.
        imports: modules to be imported while it is still root, which may read them.
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
        # Its end of the pipe tells it.
        self._pipe.close()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def connect(self, address: str, **options: Any) -> None:
        """Have it connect, instead of wherever it is connected; `options` are those of `Client`.

        Raises:
            RequestError: what it got instead.
        """
        self._order("connect", address, options)
        self._result()

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return what the method of its client gives.

        Raises:
            RequestError: what it got instead.
        """
        self._order("ask", method, args, kwargs)
        return self._result()

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        """Have it run a function, and return the result."""
        self.begin(function, *args)
        return self._result()

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """Have it begin to run a function."""
        self._order("do", function, args)

    def wait_for_report(self) -> Any:
        """Wait for what the function that it runs tells next."""
        kind, report = self._receive()
        if kind == "error":
            raise report
        assert kind == "report", kind
        return report

    def end(self) -> Any:
        """Tell the function that it runs to end; return the result."""
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
            raise UserError(f"the process of user {self.uid} says nothing for {_ANSWER_LIMIT_S:g} s")
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            raise self._dead() from None

    def _dead(self) -> UserError:
        return UserError(f"the process of user {self.uid} died with status {self._process.wait(END_LIMIT_S)}")
