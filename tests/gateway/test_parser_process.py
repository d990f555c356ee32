from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import signal
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import pytest

from weightd_gateway import parser_process as helper
from weightd_gateway.auth import Caller
from weightd_gateway.http import infer_json
from weightd_gateway.parser_process import SMALL_BYTES, ParserPool, ParserProcess
from weightd_protocol.errors import Internal, InvalidArgument, Unavailable

T = TypeVar("T")

A, B, C = Caller("a", "token a"), Caller("b", "token b"), Caller(None, "token c")


def with_helper(use: Callable[[ParserProcess], Awaitable[T]]) -> T:
    """Return what is made with a helper, within its loop."""

    async def run() -> T:
        made = ParserProcess(0)
        try:
            return await use(made)
        finally:
            await made.close()

    return asyncio.run(run())


def test_a_function_runs_in_a_child_that_starts_when_it_is_needed() -> None:
    async def use(helper: ParserProcess) -> None:
        before = helper.pid
        pid = await helper.run(A, os.getpid)
        assert (before, helper.pid) == (None, pid)
        assert pid != os.getpid()
        array = np.arange(1_000_000, dtype=np.float32)
        assert np.array_equal(await helper.run(A, np.negative, array), -array)
        assert await helper.run(B, len, pickle.PickleBuffer(bytes(1_000_000))) == 1_000_000

    with_helper(use)


def test_an_error_of_a_job_is_raised_and_the_child_goes_on() -> None:
    async def use(helper: ParserProcess) -> None:
        pid = await helper.run(A, os.getpid)
        with pytest.raises(InvalidArgument, match="expected a JSON object"):
            await helper.run(A, infer_json.parse_map, b"[")
        with pytest.raises(Internal, match="ZeroDivisionError"):
            await helper.run(A, divmod, 1, 0)
        assert await helper.run(A, os.getpid) == pid

    with_helper(use)


def test_an_error_keeps_nothing_of_its_request_once_it_is_handled() -> None:
    async def failing(helper: ParserProcess, array: np.ndarray[Any, Any]) -> None:
        await helper.run(A, divmod, array, "text")

    async def use(helper: ParserProcess) -> None:
        array = np.zeros(1000)
        kept = weakref.ref(array)
        job = failing(helper, array)
        del array
        with contextlib.suppress(Internal):
            await job
        del job
        # The next batch makes the helper forget the last one.
        await helper.run(A, os.getpid)
        assert kept() is None

    gc.disable()
    try:
        with_helper(use)
    finally:
        gc.enable()


def test_a_caller_that_has_used_more_seconds_waits_for_the_others() -> None:
    async def use(helper: ParserProcess) -> list[int]:
        done: list[int] = []

        async def job(caller: Caller, number: int, seconds: float = 0.0) -> None:
            await helper.run(caller, time.sleep, seconds)
            done.append(number)

        many = [job(A, number, 0.5) for number in range(2)]
        await asyncio.gather(*many, *(job(caller, number) for number in range(10, 14) for caller in (B, C)))
        return done

    done = with_helper(use)
    assert (done[0], done[-1]) == (0, 1)


def test_a_small_job_waits_for_no_large_one() -> None:
    async def run() -> None:
        helpers = ParserPool()
        try:
            large = asyncio.create_task(helpers.run(A, SMALL_BYTES + 1, signal.pause))
            pid = await helpers.run(B, SMALL_BYTES, os.getpid)
            assert (pid, large.done()) == (helpers.small.pid, False)
        finally:
            await helpers.close()
        with pytest.raises(Unavailable, match="is stopping"):
            await large

    asyncio.run(run())


def test_the_event_loop_has_more_of_the_processor_than_small_jobs_and_these_than_large_ones() -> None:
    async def run() -> tuple[int, int]:
        helpers = ParserPool()
        try:
            return await helpers.run(A, 0, os.nice, 0), await helpers.run(A, SMALL_BYTES + 1, os.nice, 0)
        finally:
            await helpers.close()

    small, large = asyncio.run(run())
    assert os.nice(0) < small < large or small == large == 19


def test_a_job_that_takes_too_long_fails_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(made: ParserProcess) -> None:
        pid = await made.run(A, os.getpid)
        end = made._kill_child

        def end_and_allow_more() -> None:
            monkeypatch.setattr(helper, "PARSE_TIMEOUT_S", 30.0)
            end()

        monkeypatch.setattr(made, "_kill_child", end_and_allow_more)
        monkeypatch.setattr(helper, "PARSE_TIMEOUT_S", 0.1)
        hung = asyncio.create_task(made.run(A, signal.pause))
        await asyncio.sleep(0)
        other = asyncio.create_task(made.run(B, os.getpid))
        with pytest.raises(Unavailable, match=r"took longer than 0\.1 s"):
            await hung
        assert await other not in (pid, None)

    with_helper(use)
    assert "took longer than 0.1 s; killing the process" in caplog.text


def test_a_child_that_dies_fails_the_job_and_another_one_follows() -> None:
    async def use(helper: ParserProcess) -> None:
        pid = await helper.run(A, os.getpid)
        with pytest.raises(Unavailable, match="parser process died"):
            await helper.run(A, os.kill, pid, signal.SIGKILL)
        assert await helper.run(A, os.getpid) not in (pid, None)

    with_helper(use)


def test_a_stop_of_the_service_ends_no_job() -> None:
    async def use(helper: ParserProcess) -> None:
        pid = await helper.run(A, os.getpid)
        for number in (signal.SIGTERM, signal.SIGINT):
            await helper.run(A, os.kill, pid, number)
        assert await helper.run(A, os.getpid) == pid

    with_helper(use)


def test_a_job_that_nobody_waits_for_is_left_out() -> None:
    async def use(helper: ParserProcess) -> None:
        first = asyncio.create_task(helper.run(A, os.getpid))
        second = asyncio.create_task(helper.run(A, os._exit, 1))
        await asyncio.sleep(0)
        second.cancel()
        assert await first == await helper.run(A, os.getpid)

    with_helper(use)


def test_the_child_exits_when_it_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "IDLE_S", 0.0)

    async def use(helper: ParserProcess) -> None:
        pid = await helper.run(A, os.getpid)
        while helper.pid is not None:
            await asyncio.sleep(0.01)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert await helper.run(A, os.getpid) != pid

    with_helper(use)


@pytest.mark.parametrize("starts", [False, True])
def test_jobs_end_when_the_gateway_stops(*, starts: bool) -> None:
    async def use(helper: ParserProcess) -> None:
        if starts:
            await helper.run(A, os.getpid)
        jobs = [asyncio.create_task(helper.run(caller, signal.pause)) for caller in (A, B)]
        for _ in range(3 if starts else 1):
            await asyncio.sleep(0)
        await helper.close()
        for job in jobs:
            with pytest.raises(Unavailable, match="is stopping"):
                await job
        with pytest.raises(Unavailable, match="is stopping"):
            await helper.run(A, os.getpid)

    with_helper(use)
