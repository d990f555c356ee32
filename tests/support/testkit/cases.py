"""Inputs of the self-test that tests run, made from a signature; and the search for them, with nobody who is told."""

from __future__ import annotations

from typing import Callable

from weightd_protocol.messages.worker import Build
from weightd_protocol.messages.worker_common import SelfTestCases
from weightd_worker.engines.engine import Engine, ModelSignature
from weightd_worker.selftest import search
from weightd_worker.selftest.selftest import SelfTestRun


def of(signature: ModelSignature, *sizes: int) -> SelfTestCases:
    """One case for each size: that of every free dimension."""
    return tuple(
        {each.name: tuple(size if dim < 0 else dim for dim in each.shape or ()) for each in signature.inputs}
        for size in sizes
    )


def found(engine: Engine, rebuild: Callable[[], None]) -> SelfTestRun:
    """The self-test that a holder finds which knows nothing."""
    return search.find_selftest(engine, Build(()), rebuild, lambda trying, unfit: None)
