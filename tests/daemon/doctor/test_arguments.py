from __future__ import annotations

import argparse

import pytest

from weightd_daemon.doctor import arguments


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    created = argparse.ArgumentParser()
    arguments.add_arguments(created)
    return created


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--device", "cpu"], "expected ascend:N"),
        (["--ranks", "cpu,cpu"], "expected ascend:N, got 'cpu'"),
        (["--ranks", "ascend:0,ascend:0"], "expected each device once, got 'ascend:0,ascend:0'"),
        (["--limit", "0"], "expected seconds"),
        (["--limit", "soon"], "expected seconds"),
        (["--selftest", "{x = 3}"], "x: expected list, got int 3"),
        (["--selftest", "{x"], "not TOML"),
        (["--selftest-tolerance", "nan"], "expected a number from 0 to 1"),
        (["--selftest-tolerance", "much"], "expected a number from 0 to 1"),
    ],
)
def test_rejects_invalid_arguments(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str], given: list[str], text: str
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(given)
    assert text in capsys.readouterr().err


def test_parses_arguments(parser: argparse.ArgumentParser) -> None:
    options = parser.parse_args(["--device", "ascend:3", "--selftest-tolerance", "1e-3", "--limit", "7"])
    assert (options.device, options.selftest_tolerance, options.limit) == (3, 1e-3, 7.0)


@pytest.mark.parametrize(
    ("given", "ranks"), [([], None), (["--ranks"], ()), (["--ranks", "ascend:2,ascend:0"], (2, 0))]
)
def test_parses_ranks(parser: argparse.ArgumentParser, given: list[str], ranks: tuple[int, ...] | None) -> None:
    assert parser.parse_args(given).ranks == ranks
