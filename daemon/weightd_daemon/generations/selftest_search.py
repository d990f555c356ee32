"""The search for a self-test, as the daemon sees it: what the next holder is told, because the last one died of it.

A holder says what it is about to run the model on. If it dies then, or takes too long, that input was not the one; the
next holder leaves it out. Each costs a build, so there is a bound. Who is killed from outside meanwhile has shown
nothing: the next holder tries the same again, once, for the kernel may have been out of memory because of it.
"""

from __future__ import annotations

from dataclasses import replace

from weightd_daemon.generations.spec import NO_ROW_TEST, RowTestSpec, SelfTestSpec
from weightd_protocol import limits
from weightd_protocol.messages.worker import AnnounceSelfTest, Build, Built
from weightd_protocol.messages.worker_common import SelfTestCase, SelfTestCases

# Holders that may die in the search for one self-test.
MAX_HOLDER_DEATHS = 6


def describe_cases(cases: SelfTestCases) -> str:
    """Return the inputs for people."""
    return " and ".join(map(_describe_case, cases))


def _describe_case(case: SelfTestCase) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in case.items()) or "no input"


class SelfTestSearch:
    """What is known of a generation's self-test.

    Args:
        spec: before its first holder.
        row_test: what is to be found out of rows.

    Attributes:
        spec: by now.
        current_cases: what the holder runs its model on; nothing while it does something else.
    """

    def __init__(self, spec: SelfTestSpec, row_test: RowTestSpec = NO_ROW_TEST) -> None:
        self.spec = spec
        self._row_test = row_test
        self.current_cases: SelfTestCases = ()
        self._deaths = 0
        self._retried_cases: SelfTestCases | None = None
        self._has_run = False

    def build_message(self, pids: tuple[str, ...]) -> Build:
        """Return what the holder is told."""
        spec, (rows, sizes, exact) = self.spec, self._row_test
        self._has_run = False
        return Build(pids, spec.should_search, spec.cases, spec.failed_cases, rows, sizes, exact)

    def on_announce_selftest(self, message: AnnounceSelfTest) -> None:
        """The holder has said what it tries."""
        # A configured self-test comes first.
        self._has_run = self._has_run or bool(self.current_cases and not message.cases)
        self.current_cases = message.cases
        if self.spec.should_search:
            self.spec = replace(self.spec, failed_cases=message.failed_cases)

    def on_built(self, built: Built) -> None:
        """The holder has built, with this self-test or none."""
        self.current_cases = ()
        self.spec = replace(self.spec, cases=built.selftest_cases)

    def on_holder_lost(self, *, has_timed_out: bool = False, is_external: bool = False) -> bool:
        """The holder is lost; return whether that was in a try, and another holder may do better.

        Args:
            has_timed_out: it took too long. The next one would wait as long: it is to build without a self-test.
            is_external: another has ended it.
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
