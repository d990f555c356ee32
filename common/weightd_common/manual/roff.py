"""The language of man pages: the macros of man(7) that both groff and mandoc know, and nothing else.

Text is foreign to it: whatever it contains, it is shown as it is, and is never taken for a request or an escape.
"""

from __future__ import annotations

import re
from typing import Iterable, List, Tuple

_CODE = re.compile(r"`([^`]+)`")


def escape(text: str) -> str:
    """Return `text` as roff shows it: a "-" that can be copied, a backslash that is one, no line that is a request."""
    for plain, written in (("\\", "\\e"), ("-", "\\-"), ("^", "\\(ha"), ("~", "\\(ti"), ("`", "\\(ga")):
        text = text.replace(plain, written)
    return re.sub(r"^(?=[.'])", "\\\\&", text, flags=re.MULTILINE)


def bold(text: str) -> str:
    """Return `text` as what is typed as it stands."""
    return f"\\fB{escape(text)}\\fR"


def italic(text: str) -> str:
    """Return `text` as what stands for something else."""
    return f"\\fI{escape(text)}\\fR"


def prose(text: str) -> str:
    """Return a sentence; what stands between backquotes is bold."""
    parts = _CODE.split(text)
    return "".join(bold(part) if index % 2 else escape(part) for index, part in enumerate(parts))


class ManPage:
    """A man page that is written from its top to its end.

    Args:
        name: what `man` is asked for.
        section: of the manual, such as 8.
        version: of the software.
        purpose: of it, in a line without a full stop.
    """

    def __init__(self, name: str, section: int, version: str, purpose: str) -> None:
        self.name = name
        self.section = section
        self._lines: List[str] = [
            f'.TH "{escape(name.upper())}" "{section}" "" "weightd {escape(version)}" "weightd"',
            # Words are not hyphenated and lines are flush left only: names of options stay whole. The macros of groff
            # set hyphenation anew now and then, from HY.
            ".nr HY 0",
            ".nh",
            ".ad l",
        ]
        self.heading("NAME")
        self._lines.append(f"{escape(name)} \\- {escape(purpose)}")

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._lines.append(f'.SH "{_argument(text)}"')

    def subheading(self, text: str) -> None:
        """Begin a part of a section."""
        self._lines.append(f'.SS "{_argument(text)}"')

    def text(self, text: str) -> None:
        """Add paragraphs, which blank lines part; lines that begin with two spaces are kept as they are."""
        for block in re.split(r"\n\s*\n", text.strip("\n")):
            self._lines.append(".PP")
            self._block(block)

    def _block(self, block: str) -> None:
        kept = False
        for line in block.splitlines():
            if line.startswith("  ") != kept:
                self._lines.append(".EE\n.RE" if kept else ".RS 4\n.EX")
                kept = not kept
            # roff breaks a line before one that begins with a space, and no text here means that.
            self._lines.append(escape(line[2:]) or "\\&" if kept else prose(line.strip()))
        if kept:
            self._lines.append(".EE\n.RE")

    def code(self, text: str) -> None:
        """Add lines that stay as they are."""
        self.text("\n".join(f"  {line}" for line in text.splitlines() if line))

    def synopsis(self, words: Iterable[str]) -> None:
        """Add how something is called; each of `words`, marked up already, stays on one line."""
        first, *rest = words
        glued = [word.replace(" ", "\\ ") for word in rest]
        self._lines += [".HP 4", " ".join([first, *glued])]

    def entry(self, label: str, text: str) -> None:
        """Add what a label, marked up already, means."""
        self._lines += [".TP", label]
        first, *rest = re.split(r"\n\s*\n", text.strip("\n"))
        self._lines.append(prose(" ".join(first.split())) or "\\&")
        for block in rest:
            self._lines += [".IP", prose(" ".join(block.split()))]

    def see_also(self, pages: Iterable[Tuple[str, int]]) -> None:
        """End with the pages to read next."""
        self.heading("SEE ALSO")
        self._lines.append(", ".join(f"{bold(name)}({section})" for name, section in pages))

    def source(self) -> str:
        """Return the page in roff."""
        return "\n".join(self._lines) + "\n"


def _argument(text: str) -> str:
    """Text as an argument of a macro."""
    return escape(text).replace('"', "\\(dq")
