"""Tests of the gateway's command line and exit status."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from weightd_gateway.cli import main
from weightd_gateway.server import GatewayServer

ANYBODY = "[gateway]\nanonymous = '-'\n"


def test_check_reports_valid_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text(ANYBODY)
    assert main(["--check", str(config)]) == 0
    assert capsys.readouterr().out == f"{config}: valid\n"


def test_reports_all_errors_of_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text("[gateway]\nhtpp = []\nmax_in_flight = 0\n")
    for arguments in ([str(config)], ["--check", str(config)]):
        assert main(arguments) == 78
        first, second = capsys.readouterr().err.splitlines()
        assert first == f"weightd gateway: {config}: gateway.htpp: unknown key; did you mean http?"
        assert "gateway.max_in_flight: expected" in second


def test_address_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "gateway.toml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        config.write_text(f"{ANYBODY}http = ['{place}']\ngrpc = []\n")
        assert main([str(config)]) == 73
    assert f"http: {place}: Address already in use" in capsys.readouterr().err


def test_missing_extra(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text(ANYBODY)

    def run(self: GatewayServer) -> None:
        raise AssertionError

    monkeypatch.setattr(GatewayServer, "run", run)
    monkeypatch.setitem(sys.modules, "weightd_gateway.http.server", None)
    assert main([str(config)]) == 78
    assert "pip install './weightd[gateway]'" in capsys.readouterr().err


def test_invalid_command_line() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--none"])
    assert ended.value.code == 64
