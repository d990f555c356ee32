"""Man pages in the macros of man(7) that both groff and mandoc support.

All text is escaped, so the page shows it unchanged, and roff never interprets it as a request or an escape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from tools.manual.commands import Argument, ProgramCommand

from weightd_protocol.version import VERSION

_CODE = re.compile(r"`([^`]+)`")


def escape(text: str) -> str:
    """Escape `text` for roff: "-" stays an ASCII hyphen, a backslash is literal, and no line is a request."""
    for plain, written in (("\\", "\\e"), ("-", "\\-"), ("^", "\\(ha"), ("~", "\\(ti"), ("`", "\\(ga")):
        text = text.replace(plain, written)
    return re.sub(r"^(?=[.'])", "\\\\&", text, flags=re.MULTILINE)


def bold(text: str) -> str:
    """Return `text` in bold, for literal words."""
    return f"\\fB{escape(text)}\\fR"


def italic(text: str) -> str:
    """Return `text` in italics, for placeholders."""
    return f"\\fI{escape(text)}\\fR"


def prose(text: str) -> str:
    """Return prose in roff; text between backquotes is bold."""
    parts = _CODE.split(text)
    return "".join(bold(part) if index % 2 else escape(part) for index, part in enumerate(parts))


class ManPage:
    """A man page, written from the beginning to the end.

    Args:
        name: name of the page.
        section: section of the manual, such as 8.
        purpose: summary in one line, without a full stop.
    """

    def __init__(self, name: str, section: int, purpose: str) -> None:
        self.name = name
        self.section = section
        self._lines: list[str] = [
            f'.TH "{escape(name.upper())}" "{section}" "" "weightd {escape(VERSION)}" "weightd"',
            # No hyphenation and no justification, so that names of options stay whole. The macros of groff reset
            # hyphenation from the register HY.
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
        """Begin a subsection."""
        self._lines.append(f'.SS "{_argument(text)}"')

    def text(self, text: str) -> None:
        """Add paragraphs, separated by blank lines; lines that begin with two spaces keep their layout."""
        for block in re.split(r"\n\s*\n", text.strip("\n")):
            self._lines.append(".PP")
            self._block(block)

    def _block(self, block: str) -> None:
        kept = False
        for line in block.splitlines():
            if line.startswith("  ") != kept:
                self._lines.append(".EE\n.RE" if kept else ".RS 4\n.EX")
                kept = not kept
            # roff starts a new output line at an input line that begins with a space.
            self._lines.append(escape(line[2:]) or "\\&" if kept else prose(line.strip()))
        if kept:
            self._lines.append(".EE\n.RE")

    def code(self, text: str) -> None:
        """Add preformatted lines."""
        self.text("\n".join(f"  {line}" for line in text.splitlines() if line))

    def synopsis(self, words: Iterable[str]) -> None:
        """Add a synopsis of `words` in roff. No word is broken across lines."""
        first, *rest = words
        glued = [word.replace(" ", "\\ ") for word in rest]
        self._lines += [".HP 4", " ".join([first, *glued])]

    def entry(self, label: str, text: str) -> None:
        """Add a label in roff and its explanation."""
        self._lines += [".TP", label]
        first, *rest = re.split(r"\n\s*\n", text.strip("\n"))
        self._lines.append(prose(" ".join(first.split())) or "\\&")
        for block in rest:
            self._lines += [".IP", prose(" ".join(block.split()))]

    def table(self, heading: str, rows: Mapping[str, str]) -> None:
        """Add a section of terms, in bold, with their meanings."""
        self.heading(heading)
        for term, meaning in rows.items():
            self.entry(bold(term), meaning)

    def see_also(self, pages: Iterable[tuple[str, int]]) -> None:
        """Add the section of related pages."""
        self.heading("SEE ALSO")
        self._lines.append(", ".join(f"{bold(name)}({section})" for name, section in pages))

    def source(self) -> str:
        """Return the page in roff."""
        return "\n".join(self._lines) + "\n"


def _argument(text: str) -> str:
    """Return text as an argument of a macro."""
    return escape(text).replace('"', "\\(dq")


def write_program(page: ManPage, program: ProgramCommand) -> None:
    """Write SYNOPSIS, DESCRIPTION, OPTIONS and COMMANDS of a program."""
    page.heading("SYNOPSIS")
    page.synopsis([bold(program.name), "[" + italic("OPTION") + "]...", italic("COMMAND"), "[" + italic("...") + "]"])
    for command in program.commands:
        page.synopsis(_synopsis_words(program, command))
    page.heading("DESCRIPTION")
    page.text(program.description)
    page.heading("OPTIONS")
    _arguments(page, program.options)
    page.heading("COMMANDS")
    # Options that are allowed both before and after a command are explained only once, for the program.
    common = {argument.flags for argument in program.options}
    for command in program.commands:
        page.subheading(command.name)
        page.synopsis(_synopsis_words(program, command))
        page.text(command.description)
        own = [option for option in command.options if option.flags not in common]
        _arguments(page, [*command.positionals, *own])
        if command.epilog:
            page.text(command.epilog)


def _synopsis_words(program: ProgramCommand, command: ProgramCommand) -> list[str]:
    common = {argument.flags for argument in program.options}
    options = [_option(option) for option in command.options if option.flags not in common]
    return [f"{bold(program.name)} {bold(command.name)}", *options, *map(_positional, command.positionals)]


def _option(option: Argument) -> str:
    value = f" {italic(option.metavar)}" if option.metavar else ""
    written = bold(option.flags[-1]) + value
    return (f"[{written}]" if option.is_optional else written) + ("..." if option.is_repeatable else "")


def _positional(argument: Argument) -> str:
    written = italic(argument.metavar)
    return (f"[{written}]" if argument.is_optional else written) + ("..." if argument.is_repeatable else "")


def _arguments(page: ManPage, arguments: Iterable[Argument]) -> None:
    for argument in arguments:
        value = f" {italic(argument.metavar)}" if argument.metavar else ""
        label = ", ".join(bold(flag) + value for flag in argument.flags) or italic(argument.metavar)
        page.entry(label, argument.help)
