"""Self-test inputs for tests: made from a signature, or searched for without progress reports."""

from __future__ import annotations

from typing import Callable

from weightd_protocol.messages.worker import Build
from weightd_protocol.messages.worker_common import SelfTestCases
from weightd_worker.engines.engine import Engine, ModelSignature
from weightd_worker.selftest import search
from weightd_worker.selftest.selftest import SelfTestRun


def of(signature: ModelSignature, *sizes: int) -> SelfTestCases:
    """Return one case for each size, in which every free dimension has that size."""
    return tuple(
        {each.name: tuple(size if dim < 0 else dim for dim in each.shape or ()) for each in signature.inputs}
        for size in sizes
    )


def found(engine: Engine, rebuild: Callable[[], None]) -> SelfTestRun:
    """Return the self-test that a holder finds without known cases."""
    return search.find_selftest(engine, Build(()), rebuild, lambda trying, unfit: None)
