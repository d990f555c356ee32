"""The manual has all that --help and the configuration have, and what the daemon reads besides."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weightd_common import toml_schema
from weightd_common.manual.commands import read_parser
from weightd_common.manual.reference import iterate_keys
from weightd_daemon import exit_codes
from weightd_daemon.cli import parser
from weightd_daemon.config import load as config
from weightd_daemon.config.daemon import DaemonConfig
from weightd_daemon.config.devices import DeviceConfig
from weightd_daemon.config.groups import GroupConfig
from weightd_daemon.config.listeners import ListenerConfig
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.manual import configuration, program

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SOURCES = Path(__file__).resolve().parents[3]
WEIGHTD = program.page().replace("\\-", "-")
TOML = configuration.page().replace("\\-", "-").replace("\\(ti", "~")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("manual") / "new"
    subprocess.run([sys.executable, "-m", "weightd_daemon.manual", str(directory)], check=True, timeout=60)
    return directory


def test_the_command_writes_what_the_functions_return(written: Path) -> None:
    files = {str(path.relative_to(written)): path.read_text("utf-8") for path in written.glob("*/*")}
    assert files == {
        "man/weightd.8": program.page(),
        "man/weightd.toml.5": configuration.page(),
        "completions/weightd": program.bash(),
        "examples/weightd.toml": configuration.example(),
    }


@pytest.mark.parametrize("name", ["weightd.8", "weightd.toml.5"])
def test_roff_has_nothing_to_warn_of(written: Path, name: str) -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    command = ["groff", "-k", "-ww", "-man", "-Tutf8", "-z", str(written / "man" / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""


# --- weightd(8) -----------------------------------------------------------------------------------------------------


def test_each_command_is_there_with_its_arguments() -> None:
    for command in read_parser(parser()).commands:
        part = WEIGHTD.partition(f'.SS "{command.name}"\n')[2].partition("\n.S")[0]
        for argument in [*command.options[1:], *command.positionals]:
            for word in argument.flags or (argument.metavar,):
                assert f"{word}\\fR" in part
            assert argument.help in part


def test_each_exit_status_is_there() -> None:
    statuses = {value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    assert {*exit_codes.MEANINGS} == statuses
    part = WEIGHTD.partition('.SH "EXIT STATUS"')[2].partition(".SH")[0]
    assert {int(number) for number in re.findall(r"\\fB(\d+)\\fR", part)} == statuses


def test_each_variable_that_is_read_is_there() -> None:
    files = [*SOURCES.glob("daemon/**/*.py"), SOURCES / "common/weightd_common/endpoints.py"]
    read_there = {
        name
        for path in files
        for name in re.findall(
            r"(?:environ(?:ment)?(?:\.get\(|\.pop\(|\[)|_systemd_dir\(|xdg_dir\()\"([A-Z_]+)\"",
            path.read_text("utf-8"),
        )
    }
    assert {"WEIGHTD_SOCKET", "CACHE_DIRECTORY", "XDG_RUNTIME_DIR"} <= read_there
    # Each comes with another one that is there.
    read_there -= {"LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_PID"}
    assert read_there <= set(program.ENVIRONMENT)
    assert all(f"\\fB{name}\\fR" in WEIGHTD for name in program.ENVIRONMENT)


def test_each_command_and_option_is_completed() -> None:
    script = program.bash()
    for command in read_parser(parser()).commands:
        flags = " ".join(flag for option in command.options for flag in option.flags)
        assert f"        ({command.name}) options='{flags}' " in script


# --- weightd.toml(5) ------------------------------------------------------------------------------------------------


def test_each_key_is_there_with_its_meaning() -> None:
    for table, cls in configuration.TABLES.items():
        heading = table.replace('"', "\\(dq")
        part = TOML.partition(f'.SH "[{heading}]"\n')[2].partition("\n.SH")[0]
        names = [field.name for field in toml_schema.table_keys(cls) if not field.metadata["field_type"].record]
        assert re.findall(r"^\\fB(\w+)\\fR \(", part, re.MULTILINE) == names
        for key in iterate_keys(cls):
            assert " ".join(key.meaning.split()) in re.sub(r"\\f[BR]", "`", part).replace("\\&", "")


def test_no_table_is_missing_and_a_meaning_is_that_of_its_own_key() -> None:
    outer = {DaemonConfig, ListenerConfig, TenantConfig, ModelConfig, GroupConfig, DeviceConfig}
    inner = {field.metadata["field_type"].record for cls in outer for field in toml_schema.table_keys(cls)} - {None}
    assert {*configuration.TABLES.values()} == outer | inner
    first, *_, last = iterate_keys(DaemonConfig)
    assert (first.name, first.meaning[:17]) == ("socket", "The daemon's name")
    assert (last.name, last.meaning[:10]) == ("pass_environment", "Further en")


@pytest.mark.parametrize(
    "text",
    [
        "\\fBpath\\fR (\\fItext, 1 to 4096 bytes; required\\fR)",
        "\\fBworkers\\fR (\\fIinteger, 1 to 1024; default 1\\fR)",
        '; default ["cpu"]',
        "\\fBengine\\fR (\\fIone of mindspore, mindspore_lite, onnxruntime\\fR)",
        "\\fBspares\\fR (\\fIinteger, 0 to 1024\\fR)",
    ],
)
def test_a_key_tells_its_kind_and_its_default(text: str) -> None:
    assert text in TOML


# --- the file to begin with -----------------------------------------------------------------------------------------


BASE = Path("/etc/weightd")


def parsed(text: str) -> config.Config:
    return config.parse(tomllib.loads(text), BASE)


def test_each_key_of_the_example_may_be_uncommented() -> None:
    example = configuration.example()
    only = parsed(example)
    assert {name: model.path for name, model in only.models.items()} == {"resnet50": "/srv/models/resnet50.onnx"}
    every = re.sub(r"^# (\[|\w+ = )", r"\1", example, flags=re.MULTILINE)
    file = tomllib.loads(every)
    there = [file["models"]["resnet50"], file["daemon"], file["listeners"]["NAME"], file["devices"]["ascend:0"]]
    # These say something by being there.
    extra = [there[0].pop("ranks"), *(file.pop(table)["NAME"] for table in ("groups", "tenants"))]
    extra.append(there[0].pop("mindspore_lite"))
    inner = [*(there[0][name] for name in ("batching", "split")), *extra]
    names = {"ranks", "mindspore_lite", *(name for table in [*there, *inner] for name in table)}
    assert names == {field.name for cls in configuration.TABLES.values() for field in toml_schema.table_keys(cls)}
    assert dataclasses.replace(config.parse(file, BASE), devices=only.devices, listeners=only.listeners) == only


def test_the_example_of_the_page_is_good() -> None:
    lines = TOML.partition('.SH "EXAMPLE"')[2].partition(".EX\n")[2].partition(".EE")[0]
    assert set(parsed(lines).models) == {"resnet50", "unet"}
