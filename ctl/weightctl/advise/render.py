"""What was measured and what is advised, for people, for a configuration, and for programs."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Dict, Iterator, List, Optional, Sequence

from weightctl.advise.recommend import BatchSizeResult, Recommendation, Verdict, gain, is_overhead_dominated
from weightctl.text import clean, count, paragraph, table

_HEADING = ("ROWS", "MS", "ROWS/s", "GAIN", "LATENCY", "BITS")
_NONE = "-"
_VERDICT_TEXTS = {
    Verdict.MERGE: "Merge",
    Verdict.INEXACT: "Merge only if exactness does not matter",
    Verdict.NO: "Do not merge",
}


def config_text(model: str, advice: Recommendation) -> str:
    """Return what to write into the configuration; "" where nothing is to be."""
    if advice.verdict is Verdict.NO:
        return ""
    name = model if re.match(r"[A-Za-z0-9_-]+\Z", model) else json.dumps(model)
    lines = [f"[models.{name}]", f"selftest = {json.dumps(advice.sample)}", ""] if advice.sample else []
    lines += [f"[models.{name}.batching]", f"max_rows = {advice.max_rows}"]
    lines += [f"sizes = {list(advice.sizes)}"] if advice.sizes else []
    lines += ["exact = false"] if advice.verdict is Verdict.INEXACT else []
    return "\n".join(lines)


def render(model: str, sizes: Sequence[BatchSizeResult], advice: Recommendation, distinct_rows: Optional[int]) -> str:
    """Return a table, what should be known of its rows, and what is advised.

    Args:
        model: its name.
        sizes: what was measured.
        advice: what is advised.
        distinct_rows: how many different rows there are; None: no end of them.
    """
    one = sizes[0]
    compared = max(size.comparison.rows_compared for size in sizes)
    distinct_text = (
        f", {distinct_rows:,} of them different" if distinct_rows is not None and distinct_rows < compared else ""
    )
    lines = [f"{clean(model)}: one request at a time, {count(compared, 'row')} compared{distinct_text}", ""]
    lines += table([_HEADING, *(_row(size, one) for size in sizes if size.answers)], 0, "")
    lines += ["", f"{one.overhead_s * 1e3:.2f} ms of each is the way to the worker and back; GAIN is without it"]
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
            yield f"{count(size.rows, 'row')}: the daemon cuts such requests ([models.X.split]): no single execution"
    output_names = dict.fromkeys(
        name for size in sizes for name in (*size.comparison.shape_mismatches, *size.comparison.differences)
    )
    for name in output_names:
        yield from _output_remarks(name, sizes)


def _output_remarks(name: str, sizes: Sequence[BatchSizeResult]) -> Iterator[str]:
    """What is to be said of an output, all sizes taken together."""
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
        alone = ", when it is asked for again" if differences[0][0] == 1 else ""
        yield (
            f"output {clean(name)}, from {count(differences[0][0], 'row')} on{alone}: other bits, by {largest:.2g} at"
            f" most, {relative:.2g} of the largest value of a row"
        )


def as_json(model: str, sizes: Sequence[BatchSizeResult], advice: Recommendation) -> Dict[str, Any]:
    """Return the same as a dictionary."""
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
    """JSON has no word for infinity."""
    return value if math.isfinite(value) else "Infinity"
