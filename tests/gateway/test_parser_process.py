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
    """Run `use` with a parser process in an event loop; return the result."""

    async def run() -> T:
        made = ParserProcess(0)
        try:
            return await use(made)
        finally:
            await made.close()

    return asyncio.run(run())


def test_starts_child_on_demand() -> None:
    async def use(helper: ParserProcess) -> None:
        before = helper.pid
        pid = await helper.run(A, os.getpid)
        assert (before, helper.pid) == (None, pid)
        assert pid != os.getpid()
        array = np.arange(1_000_000, dtype=np.float32)
        assert np.array_equal(await helper.run(A, np.negative, array), -array)
        assert await helper.run(B, len, pickle.PickleBuffer(bytes(1_000_000))) == 1_000_000

    with_helper(use)


def test_child_survives_error_of_a_job() -> None:
    async def use(helper: ParserProcess) -> None:
        pid = await helper.run(A, os.getpid)
        with pytest.raises(InvalidArgument, match="expected a JSON object"):
            await helper.run(A, infer_json.parse_map, b"[")
        with pytest.raises(Internal, match="ZeroDivisionError"):
            await helper.run(A, divmod, 1, 0)
        assert await helper.run(A, os.getpid) == pid

    with_helper(use)


def test_error_releases_arguments() -> None:
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
        # The next job makes the helper drop its reference to the last one.
        await helper.run(A, os.getpid)
        assert kept() is None

    gc.disable()
    try:
        with_helper(use)
    finally:
        gc.enable()


def test_caller_that_used_more_time_waits() -> None:
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


def test_small_job_does_not_wait_for_large_one() -> None:
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


def test_large_jobs_have_lowest_cpu_priority() -> None:
    async def run() -> tuple[int, int]:
        helpers = ParserPool()
        try:
            return await helpers.run(A, 0, os.nice, 0), await helpers.run(A, SMALL_BYTES + 1, os.nice, 0)
        finally:
            await helpers.close()

    small, large = asyncio.run(run())
    assert os.nice(0) < small < large or small == large == 19


def test_only_the_slow_job_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
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


def test_replaces_dead_child() -> None:
    async def use(helper: ParserProcess) -> None:
        pid = await helper.run(A, os.getpid)
        with pytest.raises(Unavailable, match="parser process died"):
            await helper.run(A, os.kill, pid, signal.SIGKILL)
        assert await helper.run(A, os.getpid) not in (pid, None)

    with_helper(use)


def test_stop_signals_do_not_end_jobs() -> None:
    async def use(helper: ParserProcess) -> None:
        pid = await helper.run(A, os.getpid)
        for number in (signal.SIGTERM, signal.SIGINT):
            await helper.run(A, os.kill, pid, number)
        assert await helper.run(A, os.getpid) == pid

    with_helper(use)


def test_skips_cancelled_job() -> None:
    async def use(helper: ParserProcess) -> None:
        first = asyncio.create_task(helper.run(A, os.getpid))
        second = asyncio.create_task(helper.run(A, os._exit, 1))
        await asyncio.sleep(0)
        second.cancel()
        assert await first == await helper.run(A, os.getpid)

    with_helper(use)


def test_idle_child_exits(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_stop_of_gateway_ends_jobs(*, starts: bool) -> None:
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
