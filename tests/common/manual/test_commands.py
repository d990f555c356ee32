from __future__ import annotations

import argparse

import pytest

from weightd_common.manual.commands import Argument, ProgramCommand, read_parser


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="thing", description="Does %(prog)s.", epilog="100% done")
    parser.add_argument("--size", type=int, default=7, metavar="N", help="how much, 50%% (default: %(default)s)")
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(metavar="COMMAND")
    go = commands.add_parser("go", help="go there")
    go.add_argument("--mode", choices=["fast", "slow"], required=True, help="how")
    go.add_argument("--tag", action="append", help="what")
    go.add_argument("place", nargs="?", help="where")
    commands.add_parser("stop", help="stop", description="Stops at once.")
    return parser


def test_what_is_declared_is_read(parser: argparse.ArgumentParser) -> None:
    thing = read_parser(parser)
    assert thing._replace(options=(), commands=()) == ProgramCommand(
        "thing", "", "Does thing.", "100% done", (), (), ()
    )
    assert [option.flags for option in thing.options] == [("-h", "--help"), ("--size",)]
    assert thing.options[0].metavar == ""
    assert thing.options[1] == Argument(
        ("--size",), "N", (), "how much, 50% (default: 7)", is_optional=True, is_repeatable=False
    )
    go, stop = thing.commands
    assert (go.name, go.help, go.description) == ("go", "go there", "go there")
    assert go.options[1:] == (
        Argument(("--mode",), "{fast,slow}", ("fast", "slow"), "how", is_optional=False, is_repeatable=False),
        Argument(("--tag",), "TAG", (), "what", is_optional=True, is_repeatable=True),
    )
    assert go.positionals == (Argument((), "PLACE", (), "where", is_optional=True, is_repeatable=False),)
    assert stop.description == "Stops at once."
