"""weightctl(1) and the completion have all that --help has."""

from __future__ import annotations

import re
from typing import Iterator, Tuple

import pytest

from weightctl import exit_codes, manual
from weightctl.cli import parser
from weightd_common.manual.commands import Argument, read_parser

WEIGHTCTL = read_parser(parser())
PAGE = manual.page(parser()).replace("\\-", "-")


def declared() -> Iterator[Tuple[str, Argument]]:
    for command in [WEIGHTCTL, *WEIGHTCTL.commands]:
        for argument in [*command.options, *command.positionals]:
            yield command.name, argument


@pytest.mark.parametrize("command", WEIGHTCTL.commands, ids=lambda command: command.name)
def test_each_verb_has_its_part(command: object) -> None:
    name = getattr(command, "name", "")
    part = PAGE.partition(f'.SS "{name}"\n')[2].partition("\n.S")[0]
    assert f"\\fBweightctl {name}\\fR" in part.replace("\\fR \\fB", " ").replace("\\ ", " ")


def test_each_argument_is_there_with_its_help() -> None:
    for command, argument in declared():
        part = PAGE if command == "weightctl" else PAGE.partition('.SH "COMMANDS"')[2].partition(f'.SS "{command}"')[2]
        common = argument.flags in {option.flags for option in WEIGHTCTL.options}
        for word in argument.flags or (argument.metavar,):
            assert f"{word}\\fR" in (PAGE if common else part)
        assert argument.help.replace("$", "$") in PAGE.replace("\\&", "")


def test_each_exit_status_is_there() -> None:
    statuses = {value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    assert {*exit_codes.MEANINGS} == statuses
    part = PAGE.partition('.SH "EXIT STATUS"')[2].partition(".SH")[0]
    assert {int(number) for number in re.findall(r"\\fB(\d+)\\fR", part)} == statuses


def test_each_verb_and_option_is_completed() -> None:
    script = manual.bash_completion(parser())
    for command, argument in declared():
        for flag in argument.flags:
            assert re.search(rf"\({'' if command == 'weightctl' else command}(''| *)\) options='[^']*{flag}\b", script)
