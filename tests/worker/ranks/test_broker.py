"""The life of a broker, with a socket that is a script and a library that is a function."""

from __future__ import annotations

import os
from typing import Any, Callable, List, Optional, Tuple

import pytest

from testkit.script import Script
from weightd_protocol.codec import encode
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.ranks import JoinGroup
from weightd_protocol.messages.worker import Build, Hello, Ping, Pong, Reconnected, Stop
from weightd_protocol.version import VERSION
from weightd_worker import exit_codes
from weightd_worker.engines.engine import BuildError, EngineMissing
from weightd_worker.sessions import rank

ENTER, STOP = encode(JoinGroup()), encode(Stop())


def play(*orders: Any, serve: Optional[Callable[[], None]] = None) -> Tuple[int, Script]:
    script: Any = Script(*orders)
    status = rank.run_broker(script, serve or (lambda: None))
    assert not script.orders, "it ended before its last order"
    return status, script


def test_it_says_what_it_is_answers_until_it_serves_and_ends_with_the_ranks() -> None:
    done: List[str] = []
    status, script = play(encode(Ping(run_selftest=False)), None, ENTER, serve=lambda: done.append("served"))
    assert (status, done) == (exit_codes.OK, ["served"])
    hello, *more = script.sent
    assert isinstance(hello, Hello)
    assert (hello.engine_pid, hello.sha256, hello.slice) == (str(os.getpid()), "none", None)
    assert hello.versions["weightd"] == VERSION
    assert more == [Pong(), Reconnected()]


def test_it_stops_when_it_is_told_to_before() -> None:
    done: List[str] = []
    assert play(STOP, serve=lambda: done.append("served"))[0] == exit_codes.OK
    assert done == []


@pytest.mark.parametrize(
    ("error", "status"), [(BuildError("rank 1 is lost"), 1), (EngineMissing("install it"), exit_codes.NO_ENGINE)]
)
def test_why_it_has_failed_is_in_its_log(error: Exception, status: int, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise error

    ended, script = play(ENTER, serve=fail)
    assert (ended, len(script.sent)) == (status, 1)
    assert caplog.messages[-1] == str(error)


def test_an_order_for_who_is_no_broker_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="expected join_group, ping or stop, got build"):
        play(encode(Build(())))
