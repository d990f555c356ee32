"""Decides whether to recommend batching for a model, and formats the result as text, configuration and JSON.

The rules, in this order:

1. Each output must have one row for each row of the inputs. No output row of a batch may differ from the output for the
   same row alone by more than 1 % of the row's largest value. A larger difference is not rounding: the model computes
   one result from all rows.
2. Before any comparison, the overhead between client and worker is subtracted from each latency, because batching does
   not reduce it. If the model takes less time for a row than this overhead, batching is not recommended.
3. Requests of eight rows must give at least 1.3 times the rows/s of requests of single rows. A smaller gain would be
   lost in everyday variation.
4. A batch of n rows is worth its latency if n waiting requests get their responses earlier on average when they run
   together. One after another, they take (n + 1) / 2 times the duration of one request on average. So the gain must be
   at least 2 n / (n + 1).
5. A size that passes rule 4 is a candidate if requests of this size and of every smaller size give the same bits as
   requests of single rows. The smallest candidate with 90 % of the best gain is recommended, unless the daemon would
   refuse to batch: the test that the daemon runs when it loads the model (`measure.BatchTest`) must find no difference,
   and a daemon that is already configured to batch the model must not have refused it.
6. If rule 5 finds no candidate, it is applied again, but allows rows to differ by rounding. The recommendation then
   includes exact = false.
"""

from __future__ import annotations

import enum
import json
import math
import re
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from weightctl.text import clean, count, paragraph, table

GAIN_ROWS = 8
MIN_GAIN = 1.3
ENOUGH_OF_BEST = 0.9
ROUNDING_TOLERANCE = 0.01
_MIXING_REASON = "the output of a row depends on the other rows by more than rounding"


class Comparison:
    """Differences between requests of one size and requests of single rows.

    Attributes:
        rows_compared: the number of rows that were compared.
        rows_unequal: the number of rows for which any output has different bits.
        differences: the differences of each output that differs, by output name.
        shape_mismatches: the shape of each output that does not have one row for each input row, by output name.
    """

    def __init__(self) -> None:
        self.rows_compared = 0
        self.rows_unequal = 0
        self.differences: Dict[str, Difference] = {}
        self.shape_mismatches: Dict[str, str] = {}

    @property
    def is_equal(self) -> bool:
        """Whether no output differed in bits or shape."""
        return not self.rows_unequal and not self.shape_mismatches

    @property
    def max_relative(self) -> float:
        """The largest difference of any output, relative to the largest value of the row."""
        return max((each.max_relative for each in self.differences.values()), default=0.0)

    def compare(self, merged: Mapping[str, Any], single: Sequence[Mapping[str, Any]]) -> None:
        """Compare the outputs of a request with several rows with the outputs of requests for each single row."""
        unequal: List[bool] = [False] * len(single)
        self.rows_compared += len(single)
        for name, array in merged.items():
            if array.ndim == 0 or len(array) != len(single):
                self.shape_mismatches[name] = f"{list(array.shape)} for {len(single)} rows"
                continue
            for index, each in enumerate(single):
                row = array[index : index + 1]
                if row.shape != each[name].shape:
                    self.shape_mismatches[name] = f"{list(row.shape)} for a row that has {list(each[name].shape)} alone"
                elif row.tobytes() != each[name].tobytes():
                    unequal[index] = True
                    self._add(name, row, each[name])
        self.rows_unequal += sum(unequal)

    def _add(self, name: str, row: Any, single: Any) -> None:
        found = self.differences.get(name, Difference(0, 0.0, 0.0))
        largest = max_difference(row, single)
        relative = relative_difference(largest, single)
        self.differences[name] = Difference(
            found.rows + 1, max(found.max_difference, largest), max(found.max_relative, relative)
        )


class Difference(NamedTuple):
    """Differences of one output between batched and single rows.

    Attributes:
        rows: the number of rows with different bits.
        max_difference: the largest absolute difference of two values; infinite if only one of them is NaN.
        max_relative: the largest difference of a row, divided by the largest value of the single row; the maximum over
            all rows.
    """

    rows: int
    max_difference: float
    max_relative: float


def max_difference(row: Any, single: Any) -> float:
    """Return the largest absolute difference of corresponding values; infinite if only one of two values is NaN."""
    # NumPy's warnings are irrelevant: the lines below handle NaN and infinite values.
    with np.errstate(invalid="ignore", over="ignore"):
        one, other = (np.asarray(each, np.float64).reshape(-1) for each in (row, single))
        differences = np.abs(one - other)
    # Treat two equal infinities, or two NaN values, as equal.
    differences[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
    differences[np.isnan(differences)] = math.inf
    return float(differences.max())


def relative_difference(difference: float, single: Any) -> float:
    """Return a difference relative to the largest finite value of a row; infinite if that value is 0."""
    if not difference:
        return 0.0
    with np.errstate(invalid="ignore"):
        values = np.abs(np.asarray(single, np.float64))
    scale = float(values[np.isfinite(values)].max(initial=0.0))
    return difference / scale if scale else math.inf


class BatchSizeResult(NamedTuple):
    """Results for requests of one size (number of rows).

    Attributes:
        rows: the number of rows in a request.
        median_s: the median latency at the client in seconds.
        overhead_s: the part of the latency in seconds that a request spends between client and worker.
        answers: the number of responses.
        comparison: the differences from single rows. For size 1, the differences between two responses for the same
            row.
        is_split: whether the daemon split a request of this size.
        refusal: why the model rejected requests of this size; "" if it accepted them.
    """

    rows: int
    median_s: float
    overhead_s: float
    answers: int
    comparison: Comparison
    is_split: bool = False
    refusal: str = ""

    @property
    def model_s(self) -> float:
        """Estimated seconds of the model for a request: the latency without overhead, at least 1 % of the latency."""
        return max(self.median_s - self.overhead_s, 0.01 * self.median_s)

    @property
    def is_measured(self) -> bool:
        """Whether the latency is known: there are responses, and the daemon did not split the requests."""
        return self.answers > 0 and not self.is_split


class Verdict(enum.Enum):
    """Whether batching is recommended, and how exact its outputs are."""

    MERGE = "merge"
    INEXACT = "inexact"
    NO = "no"


class Recommendation(NamedTuple):
    """A recommendation and its reason.

    Attributes:
        verdict: whether batching is recommended.
        max_rows: the maximum number of rows in a batch; 1 for no batching.
        sizes: the only batch sizes up to `max_rows` that the model accepts; empty if it accepts all.
        reason: the reason for the recommendation in one or two sentences.
        sample: the path of the file whose rows the daemon needs for its test; "" if it needs no file.
    """

    verdict: Verdict
    max_rows: int
    sizes: Tuple[int, ...]
    reason: str
    sample: str = ""


def not_batched(note: str) -> Recommendation:
    """Return the recommendation not to batch, because the daemon rejects batching for the reason in `note`."""
    return Recommendation(Verdict.NO, 1, (), f"the daemon rejects batching with exact outputs: {note}")


def is_overhead_dominated(one: BatchSizeResult) -> bool:
    """Return whether a request's overhead exceeds the model's time for one row, so that batching cannot help."""
    return one.model_s < one.overhead_s


def gain(size: BatchSizeResult, one: BatchSizeResult) -> float:
    """Return the rows/s of the model at this size, divided by its rows/s with single rows."""
    return size.rows * one.model_s / size.model_s


def is_worth_its_latency(size: BatchSizeResult, one: BatchSizeResult) -> bool:
    """Return whether waiting requests get their responses earlier on average if they run together (rule 4)."""
    return gain(size, one) >= 2 * size.rows / (size.rows + 1)


def recommend(sizes: Sequence[BatchSizeResult]) -> Recommendation:
    """Apply the rules of this module to `sizes`, in ascending order. The first size is 1 and must be measured."""
    one = sizes[0]
    measured = [size for size in sizes[1:] if size.is_measured]
    worthwhile = [size for size in measured if is_worth_its_latency(size, one)]
    objection = (
        _shape_objection(one, measured)
        or _mixing_objection(sizes, measured)
        or _gain_objection(one, measured, worthwhile)
    )
    if objection:
        return Recommendation(Verdict.NO, 1, (), objection)
    for verdict, share in ((Verdict.MERGE, 0.0), (Verdict.INEXACT, ROUNDING_TOLERANCE)):
        allowed = _below_first_difference(sizes, worthwhile, share)
        if allowed:
            best = _best(allowed, one)
            return Recommendation(
                verdict, best.rows, _accepted_sizes(sizes, best.rows), _gain_text(best, one) + _NOTES[verdict]
            )
    return Recommendation(Verdict.NO, 1, (), f"{_MIXING_REASON}, and smaller batches are not worthwhile")


_NOTES = {
    Verdict.MERGE: "; outputs are equal bit for bit",
    Verdict.INEXACT: "; outputs differ by rounding, which exact = false permits",
}


def _shape_objection(one: BatchSizeResult, measured: Sequence[BatchSizeResult]) -> str:
    """Return why requests of this model cannot be batched at all, because of the shapes of outputs; "" if they can."""
    for size in (one, *measured):
        for name, found in size.comparison.shape_mismatches.items():
            return f"output {name} does not have one row per input row: {found}"
    return "" if measured else "no request of several rows was answered by a single execution"


def _mixing_objection(sizes: Sequence[BatchSizeResult], measured: Sequence[BatchSizeResult]) -> str:
    """Return why batches of every size would give wrong results; "" if some size gives right results."""
    if _below_first_difference(sizes, measured, ROUNDING_TOLERANCE):
        return ""
    if sizes[0].comparison.max_relative > ROUNDING_TOLERANCE:
        return "the output of a single row changes between requests, so batches cannot be compared"
    return f"{_MIXING_REASON}: batched outputs would be wrong"


def _gain_objection(
    one: BatchSizeResult, measured: Sequence[BatchSizeResult], worthwhile: Sequence[BatchSizeResult]
) -> str:
    """Return why batching is not worthwhile for any size; "" if it is worthwhile."""
    if is_overhead_dominated(one):
        return (
            f"a row takes the model less than the overhead of {one.overhead_s * 1e3:.2f} ms between client and worker,"
            " which batching does not reduce"
        )
    candidates = [size for size in measured if size.rows <= GAIN_ROWS] or measured[:1]
    reference = candidates[-1]
    if gain(reference, one) < MIN_GAIN:
        return f"{_gain_text(reference, one)}; expected at least {MIN_GAIN} times"
    if not worthwhile:
        return f"{_gain_text(reference, one)}: waiting requests are answered sooner one after another"
    return ""


def _below_first_difference(
    sizes: Sequence[BatchSizeResult], candidates: Sequence[BatchSizeResult], relative: float
) -> List[BatchSizeResult]:
    """Return the `candidates` that are smaller than the first size whose rows differ by more than `relative`.

    A larger candidate is excluded, because its batches may also have the size at which rows differ.
    """
    end = next((size.rows for size in sizes if _differs(size, relative)), sizes[-1].rows + 1)
    return [size for size in candidates if size.rows < end]


def _differs(size: BatchSizeResult, relative: float) -> bool:
    return not size.comparison.is_equal if not relative else size.comparison.max_relative > relative


def _best(sizes: Sequence[BatchSizeResult], one: BatchSizeResult) -> BatchSizeResult:
    max_gain = max(gain(size, one) for size in sizes)
    return next(size for size in sizes if gain(size, one) >= ENOUGH_OF_BEST * max_gain)


def _accepted_sizes(sizes: Sequence[BatchSizeResult], max_rows: int) -> Tuple[int, ...]:
    """Return the sizes up to `max_rows` that the model accepts; empty if it accepts all of these sizes."""
    below = [size for size in sizes if size.rows <= max_rows]
    return tuple(size.rows for size in below if not size.refusal) if any(size.refusal for size in below) else ()


def _gain_text(size: BatchSizeResult, one: BatchSizeResult) -> str:
    return (
        f"{size.rows} rows in a batch bring {gain(size, one):.2f} times the rows/s of single rows, at "
        f"{size.median_s / one.median_s:.2f} times the latency"
    )


_HEADING = ("ROWS", "MS", "ROWS/s", "GAIN", "LATENCY", "BITS")
_NONE = "-"
_VERDICT_TEXTS = {
    Verdict.MERGE: "Batch",
    Verdict.INEXACT: "Batch only if exact outputs are not required",
    Verdict.NO: "Do not batch",
}


def config_text(model: str, advice: Recommendation) -> str:
    """Return the lines to add to the configuration file; "" if batching is not recommended."""
    if advice.verdict is Verdict.NO:
        return ""
    name = model if re.match(r"[A-Za-z0-9_-]+\Z", model) else json.dumps(model)
    lines = [f"[models.{name}]", f"selftest = {json.dumps(advice.sample)}", ""] if advice.sample else []
    lines += [f"[models.{name}.batching]", f"max_rows = {advice.max_rows}"]
    lines += [f"sizes = {list(advice.sizes)}"] if advice.sizes else []
    lines += ["exact = false"] if advice.verdict is Verdict.INEXACT else []
    return "\n".join(lines)


def render(model: str, sizes: Sequence[BatchSizeResult], advice: Recommendation, distinct_rows: Optional[int]) -> str:
    """Return a table of the results, remarks on them, and the recommendation.

    Args:
        model: the model's name.
        sizes: the results of each size.
        advice: the recommendation, with its reason.
        distinct_rows: the number of different rows that were sent; None for an unlimited number.
    """
    one = sizes[0]
    compared = max(size.comparison.rows_compared for size in sizes)
    distinct_text = (
        f", {distinct_rows:,} of them different" if distinct_rows is not None and distinct_rows < compared else ""
    )
    lines = [f"{clean(model)}: one request at a time, {count(compared, 'row')} compared{distinct_text}", ""]
    lines += table([_HEADING, *(_row(size, one) for size in sizes if size.answers)], 0, "")
    lines += ["", f"{one.overhead_s * 1e3:.2f} ms of each is overhead between client and worker; GAIN excludes it"]
    lines += _remarks(sizes)
    lines += ["", *paragraph(_VERDICT_TEXTS[advice.verdict], advice.reason, "")]
    text = config_text(model, advice)
    return "\n".join([*lines, "", *(f"  {line}" for line in text.splitlines())] if text else lines)


def _row(size: BatchSizeResult, one: BatchSizeResult) -> List[str]:
    return [
        f"{size.rows:,}",
        f"{size.median_s * 1e3:,.2f}",
        f"{size.rows / size.median_s:,.1f}",
        _NONE if is_overhead_dominated(one) else f"{gain(size, one):.2f}",
        f"{size.median_s / one.median_s:.2f}",
        _bits_cell(size),
    ]


def _bits_cell(size: BatchSizeResult) -> str:
    comparison = size.comparison
    if comparison.shape_mismatches:
        return "other shape"
    if not comparison.rows_compared:
        return _NONE
    return f"{comparison.rows_unequal:,} of {comparison.rows_compared:,} differ" if comparison.rows_unequal else "equal"


def _remarks(sizes: Sequence[BatchSizeResult]) -> Iterator[str]:
    for size in sizes:
        if size.refusal:
            yield from paragraph(f"{count(size.rows, 'row')}, refused", size.refusal.rstrip(), "")
        if size.is_split:
            label = count(size.rows, "row")
            yield f"{label}: not a single execution, because the daemon splits such requests ([models.X.split])"
    output_names = dict.fromkeys(
        name for size in sizes for name in (*size.comparison.shape_mismatches, *size.comparison.differences)
    )
    for name in output_names:
        yield from _output_remarks(name, sizes)


def _output_remarks(name: str, sizes: Sequence[BatchSizeResult]) -> Iterator[str]:
    """Yield remarks on the differences of one output, for all sizes."""
    mismatches = [
        (size.rows, size.comparison.shape_mismatches[name])
        for size in sizes
        if name in size.comparison.shape_mismatches
    ]
    for rows, found in mismatches[:1]:
        yield f"output {clean(name)}, from {count(rows, 'row')} on: {found}"
    differences = [
        (size.rows, size.comparison.differences[name]) for size in sizes if name in size.comparison.differences
    ]
    if differences:
        largest = max(found.max_difference for _, found in differences)
        relative = max(found.max_relative for _, found in differences)
        alone = ", when requested again" if differences[0][0] == 1 else ""
        yield (
            f"output {clean(name)}, from {count(differences[0][0], 'row')} on{alone}: bits differ, by {largest:.2g} at"
            f" most, {relative:.2g} of the largest value of a row"
        )


def as_json(model: str, sizes: Sequence[BatchSizeResult], advice: Recommendation) -> Dict[str, Any]:
    """Return the results and the recommendation as a dictionary for JSON."""
    return {
        "model_name": model,
        "overhead_us": sizes[0].overhead_s * 1e6,
        "sizes": [_size_json(size, sizes[0]) for size in sizes],
        "advice": {
            "verdict": advice.verdict.value,
            "max_rows": advice.max_rows,
            "sizes": list(advice.sizes),
            "reason": advice.reason,
            "configuration": config_text(model, advice),
        },
    }


def _size_json(size: BatchSizeResult, one: BatchSizeResult) -> Dict[str, Any]:
    comparison = size.comparison
    fields: Dict[str, Any] = {
        "rows": size.rows,
        "answers": size.answers,
        "p50_us": size.median_s * 1e6 if size.answers else None,
        "rows_per_s": size.rows / size.median_s if size.answers else None,
        "gain": gain(size, one) if size.answers and not is_overhead_dominated(one) else None,
        "bits_equal": comparison.is_equal if comparison.rows_compared else None,
        "rows_compared": comparison.rows_compared,
        "rows_unequal": comparison.rows_unequal,
        "split": size.is_split,
        "refused": size.refusal,
    }
    fields["outputs"] = [
        {
            "name": name,
            "rows_unequal": apart.rows,
            "largest_difference": _json_number(apart.max_difference),
            "relative_difference": _json_number(apart.max_relative),
        }
        for name, apart in comparison.differences.items()
    ] + [{"name": name, "shape": shape} for name, shape in comparison.shape_mismatches.items()]
    return fields


def _json_number(value: float) -> Any:
    """Return a float for JSON. Infinity, which JSON lacks, becomes a text."""
    return value if math.isfinite(value) else "Infinity"
