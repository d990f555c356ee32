"""What was measured and what is advised, for people, for a configuration, and for programs."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Dict, Iterator, List, Optional, Sequence

from weightd.ctl.advise.rule import Advice, Size, Verdict, gain, is_too_quick
from weightd.ctl.text import clean, count, paragraph, table

_HEADING = ("ROWS", "MS", "ROWS/s", "GAIN", "LATENCY", "BITS")
_NONE = "-"
_WORDS = {
    Verdict.MERGE: "Merge",
    Verdict.INEXACT: "Merge only if exactness does not matter",
    Verdict.NO: "Do not merge",
}


def configuration(model: str, advice: Advice) -> str:
    """Return what to write into the configuration; "" where nothing is to be."""
    if advice.verdict is Verdict.NO:
        return ""
    name = model if re.match(r"[A-Za-z0-9_-]+\Z", model) else json.dumps(model)
    lines = [f"[models.{name}]", f"canary = {json.dumps(advice.sample)}", ""] if advice.sample else []
    lines += [f"[models.{name}.batching]", f"max_rows = {advice.max_rows}"]
    lines += [f"sizes = {list(advice.sizes)}"] if advice.sizes else []
    lines += ["exact = false"] if advice.verdict is Verdict.INEXACT else []
    return "\n".join(lines)


def render(model: str, sizes: Sequence[Size], advice: Advice, different: Optional[int]) -> str:
    """Return a table, what should be known of its rows, and what is advised.

    Args:
        model: its name.
        sizes: what was measured.
        advice: what is advised.
        different: how many different rows there are; None: no end of them.
    """
    one = sizes[0]
    compared = max(size.evidence.compared for size in sizes)
    among = f", {different:,} of them different" if different is not None and different < compared else ""
    lines = [f"{clean(model)}: one request at a time, {count(compared, 'row')} compared{among}", ""]
    lines += table([_HEADING, *(_row(size, one) for size in sizes if size.answers)], 0, "")
    lines += ["", f"{one.way * 1e3:.2f} ms of each is the way to the worker and back; GAIN is without it"]
    lines += _remarks(sizes)
    lines += ["", *paragraph(_WORDS[advice.verdict], advice.reason, "")]
    text = configuration(model, advice)
    return "\n".join([*lines, "", *(f"  {line}" for line in text.splitlines())] if text else lines)


def _row(size: Size, one: Size) -> List[str]:
    return [
        f"{size.rows:,}",
        f"{size.seconds * 1e3:,.2f}",
        f"{size.rows / size.seconds:,.1f}",
        _NONE if is_too_quick(one) else f"{gain(size, one):.2f}",
        f"{size.seconds / one.seconds:.2f}",
        _bits(size),
    ]


def _bits(size: Size) -> str:
    found = size.evidence
    if found.strange:
        return "other shape"
    if not found.compared:
        return _NONE
    return f"{found.unequal:,} of {found.compared:,} differ" if found.unequal else "equal"


def _remarks(sizes: Sequence[Size]) -> Iterator[str]:
    for size in sizes:
        if size.refused:
            yield from paragraph(f"{count(size.rows, 'row')}, refused", size.refused.rstrip(), "")
        if size.is_split:
            yield f"{count(size.rows, 'row')}: the daemon cuts such requests ([models.X.split]): no single execution"
    outputs = dict.fromkeys(name for size in sizes for name in (*size.evidence.strange, *size.evidence.differences))
    for name in outputs:
        yield from _output(name, sizes)


def _output(name: str, sizes: Sequence[Size]) -> Iterator[str]:
    """What is to be said of an output, all sizes taken together."""
    strange = [(size.rows, size.evidence.strange[name]) for size in sizes if name in size.evidence.strange]
    for rows, found in strange[:1]:
        yield f"output {clean(name)}, from {count(rows, 'row')} on: {found}"
    apart = [(size.rows, size.evidence.differences[name]) for size in sizes if name in size.evidence.differences]
    if apart:
        largest = max(found.largest for _, found in apart)
        relative = max(found.relative for _, found in apart)
        alone = ", when it is asked for again" if apart[0][0] == 1 else ""
        yield (
            f"output {clean(name)}, from {count(apart[0][0], 'row')} on{alone}: other bits, by {largest:.2g} at most, "
            f"{relative:.2g} of the largest value of a row"
        )


def as_json(model: str, sizes: Sequence[Size], advice: Advice) -> Dict[str, Any]:
    """Return the same as a dictionary."""
    return {
        "model_name": model,
        "way_us": sizes[0].way * 1e6,
        "sizes": [_size(size, sizes[0]) for size in sizes],
        "advice": {
            "verdict": advice.verdict.value,
            "max_rows": advice.max_rows,
            "sizes": list(advice.sizes),
            "reason": advice.reason,
            "configuration": configuration(model, advice),
        },
    }


def _size(size: Size, one: Size) -> Dict[str, Any]:
    found = size.evidence
    told: Dict[str, Any] = {
        "rows": size.rows,
        "answers": size.answers,
        "p50_us": size.seconds * 1e6 if size.answers else None,
        "rows_per_s": size.rows / size.seconds if size.answers else None,
        "gain": gain(size, one) if size.answers and not is_too_quick(one) else None,
        "bits_equal": found.is_equal if found.compared else None,
        "rows_compared": found.compared,
        "rows_unequal": found.unequal,
        "split": size.is_split,
        "refused": size.refused,
    }
    told["outputs"] = [
        {
            "name": name,
            "rows_unequal": apart.rows,
            "largest_difference": _number(apart.largest),
            "relative_difference": _number(apart.relative),
        }
        for name, apart in found.differences.items()
    ] + [{"name": name, "shape": shape} for name, shape in found.strange.items()]
    return told


def _number(value: float) -> Any:
    """JSON has no word for infinity."""
    return value if math.isfinite(value) else "Infinity"
