"""Tracks processes that compute together, and combines their reports on each batch item into one outcome.

The ranks of a model exchange intermediate results during a predict, and nothing checks that all ranks run the same
request. If a rank skips a predict or runs one twice, all ranks return wrong answers from then on, without an error. The
tracker therefore accepts an outcome only if all processes have reported on the same item and the reports agree.
Anything else means that the processes are out of step, and then no report is trusted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from weightd_protocol import limits
from weightd_protocol.errors import Internal, RequestError, ResourceExhausted, request_error
from weightd_protocol.messages.inference import ResponseDescription, TensorSpec
from weightd_protocol.messages.worker import PredictFailed, PredictResult


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """Outcome: all processes have run the item. Contains the answer in the form in which a single process sends it."""

    result: PredictResult
    frames: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Rejected:
    """Outcome: the item ends in this error. The processes are in step: all have run the item, or none has started."""

    error: RequestError


@dataclass(frozen=True, slots=True)
class OutOfStep:
    """Outcome: the processes are out of step for this reason. None of their reports can be trusted any more."""

    reason: str


Outcome = InferenceResult | Rejected | OutOfStep

_Report = InferenceResult | PredictFailed | None
"""The report of a process about a batch item; None: the process has run the item and returns no result."""


class _Reports(dict[str, _Report]):
    """The reports of a slot's processes on one batch item, by process; `nbytes`: the bytes of all outputs so far."""

    nbytes = 0


class LockstepTracker:
    """Collects the reports of one slot's processes on the items that the slot has received.

    Args:
        processes: the processes of the slot, in the order of their ranks.
        reply_process: the process whose outputs are the answer. None: each process has a share of every output, and the
            shares are concatenated on their first axis.
        step: the number of the last step that the processes have received.

    Attributes:
        processes: as above.
        reply_process: as above.
        step: as above; each item increments it.
    """

    def __init__(self, processes: Sequence[str], reply_process: str | None, step: int = 0) -> None:
        if reply_process is not None and reply_process not in processes:
            raise ValueError(f"reply: expected one of {', '.join(processes)}, got {reply_process}")
        self.reply_process = reply_process
        self.step = step
        self.processes = tuple(processes)
        self._reports: dict[int, _Reports] = {}

    def start(self, number: int) -> int:
        """Record that the processes receive the item with this number; return the item's step."""
        self.step += 1
        self._reports[number] = _Reports()
        return self.step

    def on_result(self, process: str, result: PredictResult, frames: Sequence[Any]) -> Outcome | None:
        """Record that a process has run an item and has outputs; return the item's outcome, if it is certain already.

        While reports of other processes are missing, the result is None, unless the processes are out of step. The
        frames may be views of memory that is overwritten after the call.
        """
        return self._add_report(process, result.request, InferenceResult(result, frames))

    def on_done(self, process: str, number: int) -> Outcome | None:
        """Record that a process has run an item whose outputs another process sends; return as `on_result` does."""
        return self._add_report(process, number, None)

    def on_failed(self, process: str, failed: PredictFailed) -> Outcome | None:
        """Record that a process has rejected an item before the start, with an error; return as `on_result` does."""
        return self._add_report(process, failed.request, failed)

    # --- private ------------------------------------------------------------------------------------------------

    def _add_report(self, process: str, number: int, report: _Report) -> Outcome | None:
        reports = self._reports.get(number)
        if reports is None or process not in self.processes:
            return OutOfStep(
                f"{process}: got {_describe_report(report)} for {number}, which was not sent to this process"
            )
        problem = self._report_problem(process, report, reports)
        if problem:
            return OutOfStep(f"{process}: for {number} {problem}")
        is_last = len(reports) + 1 == len(self.processes)
        reports[process] = report if is_last else self._copy_report(reports, report)
        failed = [name for name, each in reports.items() if isinstance(each, PredictFailed)]
        if failed and len(failed) < len(reports):
            executed = ", ".join(name for name in reports if name not in failed)
            return OutOfStep(f"{number} was rejected by {', '.join(failed)} and executed by {executed}")
        if not is_last:
            return None
        del self._reports[number]
        return self._combine_reports(number, reports)

    def _report_problem(self, process: str, report: _Report, reports: _Reports) -> str:
        """Return why a report is invalid, as a text with the expected and the received report; "" if it is valid."""
        if process in reports:
            return f"expected one report, got {_describe_report(report)} after {_describe_report(reports[process])}"
        has_outputs = self.reply_process in (None, process)
        if not isinstance(report, PredictFailed) and (report is not None) != has_outputs:
            return f"expected {'a result' if has_outputs else 'done'}, got {_describe_report(report)}"
        if self.reply_process is None and isinstance(report, InferenceResult) and report.result.shared_outputs:
            return "expected frames, got outputs in shared memory"
        return ""

    def _copy_report(self, reports: _Reports, report: _Report) -> _Report:
        """Return a copy of a report, which is kept until the other processes have reported."""
        if not isinstance(report, InferenceResult):
            return report
        reports.nbytes += sum(map(len, report.frames))
        # If the total exceeds the limit already, the item is rejected whatever the other processes send, so the frames
        # are not needed.
        frames = [] if self._is_too_much(reports.nbytes) else [bytes(each) for each in report.frames]
        return InferenceResult(report.result, frames)

    def _combine_reports(self, number: int, reports: _Reports) -> Outcome:
        """Return the outcome of an item on which all processes have reported."""
        answers: list[InferenceResult] = []
        for process in self.processes:
            report = reports[process]
            if isinstance(report, PredictFailed):
                return Rejected(request_error(report.code, report.error))
            if report is not None:
                answers.append(report)
        if self.reply_process is not None:
            return answers[0]
        try:
            if self._is_too_much(sum(sum(each.result.description.sizes) for each in answers)):
                raise ResourceExhausted(f"the answer has more than {limits.MAX_FRAME_BYTES} bytes")
            return InferenceResult(*_join_answers(number, answers))
        except RequestError as error:
            return Rejected(error)

    def _is_too_much(self, nbytes: int) -> bool:
        """Return whether joined outputs are too large.

        The outputs of a single process need no check: they have arrived in a message, so they fit into one.
        """
        return self.reply_process is None and nbytes > limits.MAX_FRAME_BYTES


def _describe_report(report: _Report) -> str:
    if report is None:
        return "done"
    return report.code if isinstance(report, PredictFailed) else "a result"


def _join_answers(number: int, answers: Sequence[InferenceResult]) -> tuple[PredictResult, list[Any]]:
    """Join the answers of all processes, each of which has a share of each output, along the first axis.

    Raises:
        Internal: the shares do not fit together. The text names the output, the expected and the received value.
    """
    first = answers[0].result.description
    outputs_by_rank = [each.result.description.outputs for each in answers]
    max_outputs = max(map(len, outputs_by_rank))
    if max_outputs > len(first.outputs):
        raise Internal(f"outputs of a rank: expected {len(first.outputs)}, got {max_outputs}")
    outputs: list[TensorSpec] = []
    for index, spec in enumerate(first.outputs):
        lengths = [_first_axis_length(spec, theirs[index : index + 1]) for theirs in outputs_by_rank]
        outputs.append(dataclasses.replace(spec, shape=(sum(lengths), *spec.shape[1:])))
    frames = [b"".join([share.frames[index] for share in answers]) for index in range(len(outputs))]
    return PredictResult(number, ResponseDescription(first.model_name, tuple(outputs))), frames


def _first_axis_length(spec: TensorSpec, candidates: Collection[TensorSpec]) -> int:
    """Return the length of a rank's output on its first axis; name, datatype and other axes must equal `spec`."""
    expected_text = (
        f"output {spec.name} of a rank: expected {spec.datatype} [any, {', '.join(map(str, spec.shape[1:]))}]"
    )
    if not candidates:
        raise Internal(f"{expected_text}, got none")
    [each] = candidates
    if not each.shape or (each.name, each.datatype, each.shape[1:]) != (spec.name, spec.datatype, spec.shape[1:]):
        raise Internal(f"{expected_text}, got {each.name} {each.datatype} {list(each.shape)}")
    return each.shape[0]
