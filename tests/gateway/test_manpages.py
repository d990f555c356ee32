"""The manual has each key of the configuration, and the file to begin with is one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weightd_common import toml_schema
from weightd_gateway import manpages
from weightd_gateway.auth import Caller
from weightd_gateway.config.load import load
from weightd_gateway.config.schema import GatewayConfig

KEYS = [field.name for field in toml_schema.table_keys(GatewayConfig)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("manual") / "new"
    subprocess.run([sys.executable, "-m", "weightd_gateway.manpages", str(directory)], check=True, timeout=60)
    return directory


def test_the_command_writes_what_the_functions_return(written: Path) -> None:
    files = {str(path.relative_to(written)): path.read_text("utf-8") for path in written.glob("*/*")}
    assert files == {"man/weightd-gateway.toml.5": manpages.page(), "examples/gateway.toml": manpages.example()}


def test_roff_has_nothing_to_warn_of(written: Path) -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    command = ["groff", "-k", "-ww", "-man", "-Tutf8", "-z", str(written / "man" / "weightd-gateway.toml.5")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""


def test_each_key_is_there() -> None:
    entries = re.findall(r"\.TP\n\\fB(\w+)\\fR", manpages.page().replace("\\-", "-"))
    assert [each for each in entries if each in KEYS] == KEYS
    assert re.findall(r"^(?:# )?(\w+) = ", manpages.example(), re.MULTILINE)[: len(KEYS)] == KEYS


def test_the_file_to_begin_with_lets_this_host_ask(written: Path) -> None:
    path = written / "examples" / "gateway.toml"
    config, identities = load(path)
    assert identities.authenticate() == Caller(None, "anonymous")
    # What is commented out is what holds without it.
    path.write_text(re.sub(r'(?m)^# (\w+ = (?!"").)', r"\1", path.read_text("utf-8").partition("# [cert")[0]), "utf-8")
    assert load(path)[0] == config
