"""The sections of a man page that tell how a program is called."""

from __future__ import annotations

from typing import Iterable, List

from weightd_common.manual.commands import Argument, ProgramCommand
from weightd_common.manual.roff import ManPage, bold, italic, prose


def write_sections(page: ManPage, program: ProgramCommand) -> None:
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
    # An option that stands before a command as well as after it is explained once.
    common = {argument.flags for argument in program.options}
    for command in program.commands:
        page.subheading(command.name)
        page.synopsis(_synopsis_words(program, command))
        page.text(command.description)
        own = [option for option in command.options if option.flags not in common]
        _arguments(page, [*command.positionals, *own])
        if command.epilog:
            page.text(command.epilog)


def _synopsis_words(program: ProgramCommand, command: ProgramCommand) -> List[str]:
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


def table(page: ManPage, rows: Iterable[List[str]]) -> None:
    """Write rows of a term, which is bold, and what it means."""
    for term, meaning in rows:
        page.entry(prose(f"`{term}`"), meaning)
