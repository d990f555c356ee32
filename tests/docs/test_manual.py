"""The generated manual and shell completion: up to date, complete, and valid roff."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.manual import completion, configuration, programs
from tools.manual.__main__ import ROOT, files
from tools.manual.commands import Argument, ProgramCommand, read_parser
from tools.manual.page import ManPage, bold, escape, prose

from weightctl import exit_codes as weightctl_exit_codes
from weightctl.cli import COMMANDS
from weightd_common import toml_schema
from weightd_daemon import exit_codes as weightd_exit_codes
from weightd_daemon.config import load as config
from weightd_daemon.config.daemon import DaemonConfig
from weightd_daemon.config.devices import DeviceConfig
from weightd_daemon.config.groups import GroupConfig
from weightd_daemon.config.listeners import ListenerConfig
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.repository import RepositoryConfig
from weightd_daemon.config.tenants import TenantConfig
from weightd_gateway.auth import Caller
from weightd_gateway.config.load import load as load_gateway
from weightd_gateway.config.schema import GatewayConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILES = files()
PAGES = {
    Path(name).name: text.replace("\\-", "-").replace("\\(ti", "~") for name, text in FILES.items() if "/man/" in name
}
WEIGHTD_TOML = PAGES["weightd.toml.5"]
BASE = Path("/etc/weightd")


@pytest.mark.parametrize("name", FILES)
def test_committed_files_are_up_to_date(name: str) -> None:
    assert (ROOT / name).read_text("utf-8") == FILES[name], "run `make manual`"


def test_manual_folder_has_only_generated_files() -> None:
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "manual").glob("**/*") if path.is_file()}
    assert there == {name for name in FILES if name.startswith("manual/")}


# --- Programs -------------------------------------------------------------------------------------------------------

PROGRAMS = {"weightd.8": programs.weightd(), "weightctl.1": programs.weightctl()}


def section(page: str, heading: str) -> str:
    return PAGES[page].partition(f'.SH "{heading}"')[2].partition("\n.SH")[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_page_has_all_commands_and_arguments(name: str) -> None:
    program = PROGRAMS[name]
    common = {option.flags for option in program.options}
    parts = [(program, section(name, "OPTIONS"))]
    for command in program.commands:
        part = section(name, "COMMANDS").partition(f'.SS "{command.name}"\n')[2].partition("\n.SS")[0]
        assert f"\\fB{program.name}\\fR \\fB{command.name}\\fR" in part.replace("\\ ", " ")
        parts.append((command, part))
    for command, part in parts:
        for argument in [*command.options, *command.positionals]:
            if command is program or argument.flags not in common:
                assert all(f"{word}\\fR" in part for word in argument.flags or (argument.metavar,))
                assert prose(argument.help).replace("\\-", "-") in part


@pytest.mark.parametrize("command", [command for command in COMMANDS if COMMANDS[command].manual])
def test_page_has_extended_command_texts(command: str) -> None:
    part = section("weightctl.1", "COMMANDS").partition(f'.SS "{command}"\n')[2].partition("\n.SS")[0]
    words = " ".join(re.sub(r"(?m)^\..*$", "", part).replace("\\(ha", "^").split())
    for paragraph in COMMANDS[command].manual.split("\n\n"):
        assert " ".join(paragraph.split()) in words
    assert "See weightctl(1)" not in words


@pytest.mark.parametrize(("name", "module"), [("weightd.8", weightd_exit_codes), ("weightctl.1", weightctl_exit_codes)])
def test_page_has_all_exit_statuses(name: str, module: ModuleType) -> None:
    statuses = {value for key, value in vars(module).items() if key.isupper() and isinstance(value, int)}
    assert {*module.MEANINGS} == statuses
    assert {int(number) for number in re.findall(r"\\fB(\d+)\\fR", section(name, "EXIT STATUS"))} == statuses


def test_page_has_all_environment_variables() -> None:
    sources = [*ROOT.glob("daemon/**/*.py"), ROOT / "common/weightd_common/endpoints.py"]
    pattern = r"(?:environ(?:ment)?(?:\.get\(|\.pop\(|\[)|_systemd_dir\(|xdg_dir\()\"([A-Z_]+)\""
    variables = {name for path in sources for name in re.findall(pattern, path.read_text("utf-8"))}
    assert {"WEIGHTD_SOCKET", "CACHE_DIRECTORY", "XDG_RUNTIME_DIR"} <= variables
    # Each of these accompanies a documented variable.
    variables -= {"LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_PID"}
    assert variables <= set(programs.WEIGHTD_ENVIRONMENT)
    assert all(f"\\fB{name}\\fR" in section("weightd.8", "ENVIRONMENT") for name in programs.WEIGHTD_ENVIRONMENT)


@pytest.mark.parametrize(
    ("program", "script"),
    [
        (programs.weightd(), programs.weightd_completion()),
        (programs.weightctl(), programs.weightctl_completion()),
    ],
)
def test_completes_all_commands_and_options(program: ProgramCommand, script: str) -> None:
    for command in program.commands:
        flags = " ".join(flag for option in command.options for flag in option.flags)
        assert f"        ({command.name}) options='{flags}' " in script


# --- Configuration --------------------------------------------------------------------------------------------------

TABLES = {**configuration.TABLES, "gateway": GatewayConfig}


@pytest.mark.parametrize("table", TABLES)
def test_page_and_reference_have_all_keys(table: str) -> None:
    cls = TABLES[table]
    page = PAGES["weightd-gateway.toml.5"] if table == "gateway" else WEIGHTD_TOML
    part = page.partition(f'.SH "[{table}]"\n')[2].partition("\n.SH")[0]
    reference = FILES["docs/configuration.md"].partition(f"### `[{table}]`\n")[2].partition("\n##")[0]
    names = [field.name for field in toml_schema.table_keys(cls) if not field.metadata["field_type"].record]
    assert re.findall(r"^\\fB(\w+)\\fR \(", part, re.MULTILINE) == names
    assert re.findall(r"^- \*\*`(\w+)`\*\* \(", reference, re.MULTILINE) == names
    for key in configuration.iterate_keys(cls):
        meaning = " ".join(key.meaning.split())
        assert meaning in re.sub(r"\\f[BR]", "`", part).replace("\\&", "").replace("\\(dq", '"')
        default = "required" if key.is_required else f"default `{key.default}`"
        assert f"- **`{key.name}`** ({configuration.short_kind(key.kind)}" in reference
        [line] = re.findall(rf"^- \*\*`{key.name}`\*\* .*", reference, re.MULTILINE)
        assert meaning in line
        assert not key.default.strip('"') or default in line
        example = configuration.example_of(key)
        assert f"`{example}`" in line or example.partition(" = ")[2] == key.default
        [(_, value)] = tomllib.loads(example).items()
        kinds = {field.name: field.metadata["field_type"] for field in toml_schema.table_keys(cls)}
        kinds[key.name].check(value)


def test_reference_has_all_tables_and_right_meanings() -> None:
    outer = {DaemonConfig, ListenerConfig, TenantConfig, ModelConfig, GroupConfig, DeviceConfig, RepositoryConfig}
    inner = {field.metadata["field_type"].record for cls in outer for field in toml_schema.table_keys(cls)} - {None}
    assert {*configuration.TABLES.values()} == outer | inner
    first, *_, last = configuration.iterate_keys(DaemonConfig)
    assert (first.name, first.meaning[:21]) == ("socket", "Address of the daemon")
    assert (last.name, last.meaning[:14]) == ("pass_environment", "Additional env")


@pytest.mark.parametrize(
    "text",
    [
        "\\fBpath\\fR (\\fItext, 1 to 4096 bytes; required\\fR)",
        "\\fBworkers\\fR (\\fIinteger, 1 to 1024, or a table with min and max; default 1\\fR)",
        '; default ["cpu"]',
        "\\fBspares\\fR (\\fIinteger, 0 to 1024\\fR)",
    ],
)
def test_keys_have_type_and_default(text: str) -> None:
    assert text in WEIGHTD_TOML


def parsed(text: str) -> config.Config:
    return config.parse(tomllib.loads(text), BASE)


def test_every_key_of_initial_file_can_be_uncommented() -> None:
    example = configuration.weightd_file()
    only = parsed(example)
    assert {name: model.path for name, model in only.models.items()} == {"resnet50": "/srv/models/resnet50.onnx"}
    every = re.sub(r"^# (\[|\w+ = )", r"\1", example, flags=re.MULTILINE)
    file = tomllib.loads(every)
    there = [file["models"]["resnet50"], file["daemon"], file["listeners"]["NAME"], file["devices"]["ascend:0"]]
    # The presence of these tables changes the configuration.
    extra = [there[0].pop("ranks"), *(file.pop(table)["NAME"] for table in ("groups", "tenants"))]
    extra.append(file.pop("repository"))
    extra.append(there[0].pop("mindspore_lite"))
    inner = [*(there[0][name] for name in ("batching", "split")), *extra]
    names = {"ranks", "mindspore_lite", *(name for table in [*there, *inner] for name in table)}
    assert names == {field.name for cls in configuration.TABLES.values() for field in toml_schema.table_keys(cls)}
    assert dataclasses.replace(config.parse(file, BASE), devices=only.devices, listeners=only.listeners) == only


def test_examples_are_valid() -> None:
    lines = section("weightd.toml.5", "EXAMPLE").partition(".EX\n")[2].partition(".EE")[0]
    blocks = re.findall(r"```toml\n(.*?)```", FILES["docs/configuration.md"], re.DOTALL)
    assert [set(parsed(text).models) for text in (lines, blocks[0])] == [{"resnet50", "unet"}] * 2
    assert tomllib.loads(blocks[1]) == {"gateway": {"anonymous": "-"}}


def test_initial_gateway_file_allows_local_clients(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(configuration.gateway_file(), "utf-8")
    settings, identities = load_gateway(path)
    assert identities.authenticate() == Caller(None, "anonymous")
    # The commented-out lines show the defaults.
    path.write_text(re.sub(r'(?m)^# (\w+ = (?!"").)', r"\1", path.read_text("utf-8").partition("# [cert")[0]), "utf-8")
    assert load_gateway(path)[0] == settings


# --- Parser of command lines ----------------------------------------------------------------------------------------


def test_reads_parser() -> None:
    parser = argparse.ArgumentParser(prog="thing", description="Does %(prog)s.", epilog="100% done")
    parser.add_argument("--size", type=int, default=7, metavar="N", help="how much, 50%% (default: %(default)s)")
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(metavar="COMMAND")
    go = commands.add_parser("go", help="go there")
    go.add_argument("--mode", choices=["fast", "slow"], required=True, help="how")
    go.add_argument("--tag", action="append", help="what")
    go.add_argument("place", nargs="?", help="where")
    commands.add_parser("stop", help="stop", description="Stops at once.")
    thing = read_parser(parser)
    assert (thing.description, thing.epilog, thing.positionals) == ("Does thing.", "100% done", ())
    assert [option.flags for option in thing.options] == [("-h", "--help"), ("--size",)]
    assert thing.options[0].metavar == ""
    assert thing.options[1] == Argument(
        ("--size",), "N", (), "how much, 50% (default: 7)", is_optional=True, is_repeatable=False
    )
    read, stop = thing.commands
    assert (read.name, read.help, read.description) == ("go", "go there", "go there")
    assert read.options[1:] == (
        Argument(("--mode",), "{fast,slow}", ("fast", "slow"), "how", is_optional=False, is_repeatable=False),
        Argument(("--tag",), "TAG", (), "what", is_optional=True, is_repeatable=True),
    )
    assert read.positionals == (Argument((), "PLACE", (), "where", is_optional=True, is_repeatable=False),)
    assert stop.description == "Stops at once."


# --- Pages ----------------------------------------------------------------------------------------------------------


def shown(source: str, width: int = 4096) -> list[str]:
    """Return the lines of a page as on a terminal, without blank lines and title; warnings of groff are errors."""
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    command = ["groff", "-k", "-ww", "-man", "-Tutf8", "-P-cbou", f"-rLL={width}n"]
    done = subprocess.run(command, input=source.encode(), capture_output=True, timeout=60, check=True)
    assert done.stderr == b""
    return [line for line in done.stdout.decode().splitlines()[1:-1] if line]


@pytest.fixture
def page() -> ManPage:
    return ManPage("thing", 8, "does it")


def test_formats_page(page: ManPage) -> None:
    page.heading("DESCRIPTION")
    page.text("First\nparagraph.\n\nSecond, with `code`:\n\n  $ run -it\n    'more'\n.not a request")
    page.entry(bold("--size"), "How\nmuch.\n\nNot little.")
    page.see_also([("other", 1)])
    assert page.source().startswith('.TH "THING" "8" "" "weightd ')
    assert shown(page.source()) == [
        "NAME",
        "       thing - does it",
        "DESCRIPTION",
        "       First paragraph.",
        "       Second, with code:",
        "           $ run -it",
        "             'more'",
        "       .not a request",
        "       --size How much.",
        "              Not little.",
        "SEE ALSO",
        "       other(1)",
    ]


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_valid_roff(name: str) -> None:
    assert shown(next(text for path, text in FILES.items() if path.endswith(f"/{name}")), 78)


@pytest.mark.parametrize("text", [".so /etc/passwd", "'br", "a \\n(.z b", "-", '"a" b', "~^`", "\\fB\\", "\\*[x]"])
def test_escapes_text(page: ManPage, text: str) -> None:
    page.heading("X")
    page.text(text)
    assert shown(page.source())[-1].strip() == text


def test_hyphenates_no_words(page: ManPage) -> None:
    long = "considerations of interpreters and of their configuration " * 20
    page.heading("X")
    page.synopsis(["x"])
    page.text(f"{long}\n\n  code\n\n{long}")
    page.subheading("x")
    page.entry("x", long)
    page.text(long)
    assert not [line for line in shown(page.source(), 60) if "\u2010" in line]


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_text_never_starts_roff_request(text: str) -> None:
    assert not re.search(r"^[.']", escape(text), re.MULTILINE)
    assert not re.search(r"^[.']", prose(text), re.MULTILINE)


# --- Completion -----------------------------------------------------------------------------------------------------

Complete = Callable[..., list[str]]

# Simulates bash at a tab; the last word is completed.
_PRESS = """
set -u
source script
COMP_LINE="$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_thing
printf '%s\\n' "${COMPREPLY[@]}"
"""

# The program that completion asks for model names.
_THING = """#!/bin/sh
case "$*" in ('status --timeout 1'|'status --timeout 1 --socket=ipc:///x') ;; (*) exit 1 ;; esac
cat <<END
weightd 1: running, pid 7
resnet: SERVING, onnxruntime, /x
  note: NO, x
un-et: FAILED, x
ascend:0: 1 MB of 2 MB
END
"""


KINDS = {"MODEL": completion.MODEL, "PATH": completion.FILE, "DIR": completion.DIRECTORY}


@pytest.fixture
def complete(tmp_path: Path) -> Complete:
    parser = argparse.ArgumentParser(prog="thing")
    parser.add_argument("--socket", metavar="ADDRESS")
    commands = parser.add_subparsers()
    show = commands.add_parser("show", help="x")
    show.add_argument("model", metavar="MODEL")
    show.add_argument("path", metavar="PATH")
    show.add_argument("--mode", choices=["fast", "slow"])
    show.add_argument("--out", metavar="DIR")
    commands.add_parser("shut", help="x").add_argument("what", choices=["door", "window"])
    (tmp_path / "script").write_text(completion.bash_script(read_parser(parser), KINDS))
    (tmp_path / "a file").write_text("")
    (tmp_path / "a dir").mkdir()
    (tmp_path / "thing").write_text(_THING)
    (tmp_path / "thing").chmod(0o755)

    def press(*words: str, line: str = "") -> list[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", _PRESS, "bash", line or " ".join(words), "thing", *words],
            cwd=str(tmp_path),
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True,
            timeout=30,
            check=False,
        )
        # Errors would appear in the command line that the user types.
        assert done.stderr == b""
        return sorted(done.stdout.decode().split("\n")[:-1])

    return press


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ([""], ["show", "shut"]),
        (["sho"], ["show"]),
        (["-"], ["--help", "--socket", "-h"]),
        (["show", "--"], ["--help", "--mode", "--out"]),
        (["nonsense", ""], [""]),
        (["show", "--mode", ""], ["fast", "slow"]),
        (["show", "--mode", "=", "s"], ["slow"]),
        (["show", "--mode", "="], ["fast", "slow"]),
        (["shut", "w"], ["window"]),
        (["show", "resnet", "a"], ["a dir", "a file"]),
        (["show", "--mode", "fast", "resnet", "a"], ["a dir", "a file"]),
        (["show", "resnet", "--out", "a"], ["a dir"]),
        (["show", "resnet", "x", "a"], [""]),
        # The daemon supplies the names of models.
        (["show", ""], ["resnet", "un-et"]),
        (["show", "re"], ["resnet"]),
    ],
)
def test_completions(complete: Complete, words: list[str], offered: list[str]) -> None:
    assert complete(*words) == offered


@pytest.mark.parametrize("option", ["--socket ipc:///x", "--socket=ipc:///x"])
def test_completion_uses_given_socket(complete: Complete, option: str) -> None:
    # bash splits words at colons and equals signs.
    words = option.replace(":", " : ").replace("=", " = ").split()
    assert complete(*words, "sho") == ["show"]
    assert complete(*words) == [""]
    assert complete(*words, "show", "", line=f"thing {option} show ") == ["resnet", "un-et"]
    assert complete(*words, "show", "", line=f"thing {option}wrong show ") == [""]
