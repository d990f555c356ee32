"""Styled lines of text, with sparklines and bars."""

from __future__ import annotations

import enum
import unicodedata
from typing import List, NamedTuple, Optional, Sequence, Tuple

from weightctl.text import clean


class Style(enum.Enum):
    """The meaning of a piece of text, which determines its colour."""

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
    """A line of styled spans; `is_selected` marks the line with the cursor."""

    spans: Sequence[Span]
    is_selected: bool = False

    @property
    def text(self) -> str:
        """The text without styles."""
        return "".join(text for text, _ in self.spans)


def text_line(text: str = "", style: Style = Style.TEXT) -> StyledLine:
    """Return a line with one span."""
    return StyledLine([(text, style)])


def truncate(line: StyledLine, width: int) -> StyledLine:
    """Return the part of a line that fits the width."""
    spans: List[Span] = []
    for text, style in line.spans:
        spans.append((text[: max(0, width)], style))
        width -= len(text)
    return StyledLine([each for each in spans if each[0]], line.is_selected)


def narrow(text: str) -> str:
    """Return untrusted text with wide, combining and control characters escaped, so that each takes one column."""
    return "".join(each if _is_narrow(each) else ascii(each)[1:-1] for each in clean(text))


def _is_narrow(character: str) -> bool:
    is_wide = unicodedata.east_asian_width(character) in "WF"
    return not is_wide and not unicodedata.combining(character)


class Glyphs(NamedTuple):
    """The characters for sparklines and bars.

    Attributes:
        spark: characters in ascending height; the first one means zero.
        copy: the shared copy of the weights.
        beside: private memory of workers.
        other: other memory.
        plain: memory that processes without sharing would take.
    """

    spark: str
    copy: str
    beside: str
    other: str
    plain: str


# A segment of a bar: size, character and style.
Segment = Tuple[int, str, Style]


BLOCKS = Glyphs(" ▁▂▃▄▅▆▇█", "█", "▓", "▒", "░")


ASCII = Glyphs(" .:-=+*#@", "#", "+", "-", ".")


def glyphs(encoding: Optional[str]) -> Glyphs:
    """Return the glyphs that the encoding supports."""
    try:
        "".join(BLOCKS).encode(encoding or "ascii")
    except (UnicodeError, LookupError):
        return ASCII
    return BLOCKS


def spark(values: Sequence[Optional[float]], width: int, glyphs: Glyphs) -> str:
    """Return a sparkline of the last `width` values, scaled to the largest one; unknown values are blank.

    Values above zero are always visible.
    """
    last = values[-width:] if width > 0 else ()
    maximum = max((each for each in last if each is not None), default=0.0)
    steps = len(glyphs.spark) - 1
    drawn = [0 if not each or maximum <= 0 else max(1, round(steps * each / maximum)) for each in last]
    return "".join(glyphs.spark[each] for each in drawn).rjust(max(0, width))


def bar(segments: Sequence[Segment], total: int, width: int) -> List[Span]:
    """Return the segments of a bar, with rounding such that their total width is accurate, too.

    Args:
        segments: sizes, characters and styles.
        total: the size of the whole width.
        width: width of the bar in columns.
    """
    spans: List[Span] = []
    size, drawn = 0, 0
    for part, character, style in segments:
        size += part
        end = round(width * size / total) if total > 0 else 0
        spans.append((character * (end - drawn), style))
        drawn = end
    return [*spans, (" " * (width - drawn), Style.TEXT)]
