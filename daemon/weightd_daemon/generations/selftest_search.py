"""The daemon's part of the search for a self-test: which inputs the next holder tries after a holder was lost.

A holder announces the inputs on which it will run the model. If the holder then exits or exceeds its deadline, these
inputs are unsuitable, and the next holder skips them. Every lost holder costs a build, so the number of lost holders is
limited. If the holder is killed from outside, the next holder tries the same inputs again, but only once, because these
inputs may have made the kernel run out of memory and kill the holder.
"""

from __future__ import annotations

from dataclasses import replace

from weightd_daemon.generations.spec import NO_ROW_TEST, RowTestSpec, SelfTestSpec
from weightd_protocol import limits
from weightd_protocol.messages.worker import AnnounceSelfTest, Build, Built
from weightd_protocol.messages.worker_common import SelfTestCase, SelfTestCases

# Maximum number of holders that may be lost in the search for one self-test.
MAX_HOLDER_DEATHS = 6


def describe_cases(cases: SelfTestCases) -> str:
    """Return the inputs of a self-test as a text for users."""
    return " and ".join(map(_describe_case, cases))


def _describe_case(case: SelfTestCase) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in case.items()) or "no input"


def _is_complete(built: Built) -> bool:
    """Return whether workers can load without a holder, given this report of an earlier holder.

    On a card, each generation needs a holder, because its build reports the card's memory.
    """
    return built.device is None and not (built.handle or built.is_template or built.has_sharing_failed)


class SelfTestSearch:
    """The state of the search for a generation's self-test.

    Args:
        spec: the self-test settings for the first holder.
        row_test: the row test that the holders run.

    Attributes:
        spec: the self-test settings for the next holder.
        current_cases: the inputs that the holder has announced and on which it runs the model; empty outside of a
            self-test.
    """

    def __init__(self, spec: SelfTestSpec, row_test: RowTestSpec = NO_ROW_TEST) -> None:
        self.spec = spec
        self._row_test = row_test
        self.current_cases: SelfTestCases = ()
        self._deaths = 0
        self._retried_cases: SelfTestCases | None = None
        self._has_run = False

    def build_message(self, pids: tuple[str, ...]) -> Build:
        """Return the build order for the next holder. `pids`: `Hello.engine_pid` of each worker that will attach."""
        spec, (rows, sizes, exact) = self.spec, self._row_test
        self._has_run = False
        return Build(pids, spec.should_search, spec.cases, spec.failed_cases, rows, sizes, exact, spec.digest)

    def on_announce_selftest(self, message: AnnounceSelfTest) -> None:
        """Record the inputs that the holder announces."""
        # The holder announces the configured self-test first. An announcement without inputs shows that this self-test
        # has run.
        self._has_run = self._has_run or bool(self.current_cases and not message.cases)
        self.current_cases = message.cases
        if self.spec.should_search:
            self.spec = replace(self.spec, failed_cases=message.failed_cases)

    def on_built(self, built: Built) -> None:
        """Record the self-test that the holder has found, if any."""
        self.current_cases = ()
        self.spec = replace(
            self.spec,
            cases=built.selftest_cases,
            digest=built.selftest_digest,
            built=built if _is_complete(built) else None,
        )

    def on_holder_lost(self, *, has_timed_out: bool = False, is_external: bool = False) -> bool:
        """Record the loss of a holder; return whether it was lost in a self-test and another holder may succeed.

        Args:
            has_timed_out: whether the holder exceeded its deadline. Another search would take as long, so the next
                holder builds without a search.
            is_external: whether the holder was ended from outside, by a user or by the kernel.
        """
        tried, self.current_cases = self.current_cases, ()
        if not tried:
            return False
        if is_external and tried != self._retried_cases:
            self._retried_cases = tried
            return True
        if not self.spec.should_search and not self._has_run:
            return False
        self._deaths += 1
        failed_cases = (*self.spec.failed_cases, *(case for case in tried if case not in self.spec.failed_cases))
        if not self.spec.should_search:
            self.spec = replace(self.spec, failed_cases=failed_cases[: limits.MAX_SELFTEST_UNFIT_CASES])
            return self._deaths < MAX_HOLDER_DEATHS
        should_stop = (
            has_timed_out or self._deaths >= MAX_HOLDER_DEATHS or len(failed_cases) > limits.MAX_SELFTEST_UNFIT_CASES
        )
        self.spec = SelfTestSpec(not should_stop, (), failed_cases[: limits.MAX_SELFTEST_UNFIT_CASES])
        return True
