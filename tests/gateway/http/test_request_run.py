"""Tests of the runner of requests: it behaves like a task of asyncio, but begins and continues at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from weightd_gateway.http.request_run import RequestRun

Step = Callable[[str], None]


def run(scenario: Callable[[Step, list[str]], Awaitable[None]]) -> list[str]:
    seen: list[str] = []
    asyncio.run(_as_coroutine(scenario(seen.append, seen)))
    return seen


async def _as_coroutine(what: Awaitable[None]) -> None:
    await what


def test_runs_at_once_until_the_first_wait() -> None:
    async def scenario(step: Step, seen: list[str]) -> None:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def request() -> None:
            step("began")
            step(await future)
            await asyncio.sleep(0)
            step("ended")

        request_run = RequestRun(request())
        request_run.go_on()
        assert seen == ["began"]
        future.set_result("went on")
        await asyncio.wait_for(request_run.end_waiter(), 30)
        assert request_run.is_done

    assert run(scenario) == ["began", "went on", "ended"]


@pytest.mark.parametrize("waits_for", ["future", "sleep", "task", "ended future"])
def test_cancel_raises_where_the_coroutine_waits(waits_for: str) -> None:
    async def scenario(step: Step, seen: list[str]) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def request() -> None:
            try:
                if waits_for == "sleep":
                    await asyncio.sleep(0)
                elif waits_for == "task":
                    await asyncio.create_task(asyncio.Event().wait())
                else:
                    await future
                step("not cancelled")
            except asyncio.CancelledError:
                step("cancelled")
                await asyncio.sleep(0)
                step("cleaned up")
                raise

        request_run = RequestRun(request())
        request_run.go_on()
        if waits_for == "ended future":
            future.set_result(None)
        request_run.cancel()
        await asyncio.wait_for(request_run.end_waiter(), 30)
        request_run.cancel()

    assert run(scenario) == ["cancelled", "cleaned up"]


def test_cancel_within_the_coroutine_ends_its_next_wait() -> None:
    async def scenario(step: Step, seen: list[str]) -> None:
        async def request() -> None:
            request_run.cancel()
            step("went on")
            await asyncio.Event().wait()

        request_run = RequestRun(request())
        request_run.go_on()
        await asyncio.wait_for(request_run.end_waiter(), 30)

    assert run(scenario) == ["went on"]


def test_other_errors_are_the_callers() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    request_run = RequestRun(fail())
    with pytest.raises(ZeroDivisionError):
        request_run.go_on()
    assert request_run.is_done
