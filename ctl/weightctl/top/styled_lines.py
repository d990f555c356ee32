"""Lines of a screen, and what their parts are; how that looks is the terminal's."""

from __future__ import annotations

import enum
import unicodedata
from typing import List, NamedTuple, Sequence, Tuple

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
