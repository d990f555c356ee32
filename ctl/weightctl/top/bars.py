"""Sparks and bars, of characters that a terminal has."""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

from weightctl.top.styled_lines import Span, Style


class Glyphs(NamedTuple):
    """What they are drawn with.

    Attributes:
        spark: from the least to the most; the first is for nothing.
        copy: of a bar, the one copy.
        beside: what workers have beside it.
        other: what else there is.
        plain: what plain processes would take.
    """

    spark: str
    copy: str
    beside: str
    other: str
    plain: str


# Of a bar: its size, the character, and what it is.
Segment = Tuple[int, str, Style]

BLOCKS = Glyphs(" ▁▂▃▄▅▆▇█", "█", "▓", "▒", "░")
ASCII = Glyphs(" .:-=+*#@", "#", "+", "-", ".")


def glyphs(encoding: Optional[str]) -> Glyphs:
    """Return what can be drawn in an encoding."""
    try:
        "".join(BLOCKS).encode(encoding or "ascii")
    except (UnicodeError, LookupError):
        return ASCII
    return BLOCKS


def spark(values: Sequence[Optional[float]], width: int, glyphs: Glyphs) -> str:
    """Return the last values, each as high as its share of the most; nothing where a value is not known.

    What is more than nothing is seen.
    """
    last = values[-width:] if width > 0 else ()
    maximum = max((each for each in last if each is not None), default=0.0)
    steps = len(glyphs.spark) - 1
    drawn = [0 if not each or maximum <= 0 else max(1, round(steps * each / maximum)) for each in last]
    return "".join(glyphs.spark[each] for each in drawn).rjust(max(0, width))


def bar(segments: Sequence[Segment], total: int, width: int) -> List[Span]:
    """Return parts of a whole, each as wide as its share, one beside the other; all together they are right, too.

    Args:
        segments: sizes, characters and styles.
        total: what the whole width stands for.
        width: of the bar.
    """
    spans: List[Span] = []
    size, drawn = 0, 0
    for part, character, style in segments:
        size += part
        end = round(width * size / total) if total > 0 else 0
        spans.append((character * (end - drawn), style))
        drawn = end
    return [*spans, (" " * (width - drawn), Style.TEXT)]
