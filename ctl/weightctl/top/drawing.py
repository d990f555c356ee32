"""Styled lines of text, and the sparklines and bars that are drawn in them."""

from __future__ import annotations

import enum
import unicodedata
from typing import List, NamedTuple, Optional, Sequence, Tuple

from weightctl.text import clean


class Style(enum.Enum):
    """What a piece of text is."""

    TEXT = "text"
    STRONG = "strong"
    WEAK = "weak"
    HEAD = "head"
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    COPY = "copy"
    BESIDE = "beside"
    OTHER = "other"
    PLAIN = "plain"


Span = Tuple[str, Style]


class StyledLine(NamedTuple):
    """Pieces, one beside the other; `is_selected` is the line on which the cursor is."""

    spans: Sequence[Span]
    is_selected: bool = False

    @property
    def text(self) -> str:
        """It without its styles."""
        return "".join(text for text, _ in self.spans)


def text_line(text: str = "", style: Style = Style.TEXT) -> StyledLine:
    """Return a line of one piece."""
    return StyledLine([(text, style)])


def truncate(line: StyledLine, width: int) -> StyledLine:
    """Return as much of a line as there is room for."""
    spans: List[Span] = []
    for text, style in line.spans:
        spans.append((text[: max(0, width)], style))
        width -= len(text)
    return StyledLine([each for each in spans if each[0]], line.is_selected)


def narrow(text: str) -> str:
    """Return foreign text of which each character takes one column, and none plays tricks on the terminal."""
    return "".join(each if _is_narrow(each) else ascii(each)[1:-1] for each in clean(text))


def _is_narrow(character: str) -> bool:
    is_wide = unicodedata.east_asian_width(character) in "WF"
    return not is_wide and not unicodedata.combining(character)


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
