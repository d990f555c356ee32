"""Lines of text with styles, sparklines (small charts of characters), and bars."""

from __future__ import annotations

import enum
import unicodedata
from typing import List, NamedTuple, Optional, Sequence, Tuple

from weightctl.text import clean


class Style(enum.Enum):
    """The meaning of a piece of text. It determines the colour of the text."""

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
    """A line of text spans, each with a style. `is_selected` is True for the row on which the cursor is."""

    spans: Sequence[Span]
    is_selected: bool = False

    @property
    def text(self) -> str:
        """The text without styles."""
        return "".join(text for text, _ in self.spans)


def text_line(text: str = "", style: Style = Style.TEXT) -> StyledLine:
    """Return a line that consists of one span."""
    return StyledLine([(text, style)])


def truncate(line: StyledLine, width: int) -> StyledLine:
    """Return the beginning of a line, at most `width` characters."""
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
    """The characters with which sparklines and bars are drawn.

    Attributes:
        spark: the characters of a sparkline, in ascending height. The first one shows zero.
        copy: the character for the shared copy of the weights.
        beside: the character for private memory of workers.
        other: the character for all other memory.
        plain: the character for the memory that processes would need if they shared nothing.
    """

    spark: str
    copy: str
    beside: str
    other: str
    plain: str


# A segment of a bar: its size, its character and its style.
Segment = Tuple[int, str, Style]


BLOCKS = Glyphs(" ▁▂▃▄▅▆▇█", "█", "▓", "▒", "░")


ASCII = Glyphs(" .:-=+*#@", "#", "+", "-", ".")


def glyphs(encoding: Optional[str]) -> Glyphs:
    """Return the characters for sparklines and bars that the encoding can represent."""
    try:
        "".join(BLOCKS).encode(encoding or "ascii")
    except (UnicodeError, LookupError):
        return ASCII
    return BLOCKS


def spark(values: Sequence[Optional[float]], width: int, glyphs: Glyphs) -> str:
    """Return a sparkline of the last `width` values. The largest value has full height; unknown values are blank.

    Every value above zero is visible.
    """
    last = values[-width:] if width > 0 else ()
    maximum = max((each for each in last if each is not None), default=0.0)
    steps = len(glyphs.spark) - 1
    drawn = [0 if not each or maximum <= 0 else max(1, round(steps * each / maximum)) for each in last]
    return "".join(glyphs.spark[each] for each in drawn).rjust(max(0, width))


def bar(segments: Sequence[Segment], total: int, width: int) -> List[Span]:
    """Return the segments of a bar as spans. The rounded widths of the spans add up to the width of the bar.

    Args:
        segments: size, character and style of each segment.
        total: the size that the full width of the bar represents.
        width: the width of the bar in columns.
    """
    spans: List[Span] = []
    size, drawn = 0, 0
    for part, character, style in segments:
        size += part
        end = round(width * size / total) if total > 0 else 0
        spans.append((character * (end - drawn), style))
        drawn = end
    return [*spans, (" " * (width - drawn), Style.TEXT)]
