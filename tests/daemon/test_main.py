"""Start of `weightd`: Python version, zygote, argument errors and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from testkit import interrupting, mindir
from weightd_daemon import __main__, cli, exit_codes

PROGRAM = interrupting.PROGRAM.format(module="weightd_daemon.__main__")


def test_rejects_python_older_than_3_10() -> None:
    python = mindir.interpreter()
    if python is None:
        pytest.skip(mindir.HOW_TO_GET_IT)
    path = os.pathsep.join(str(mindir.REPOSITORY / each) for each in ("common", "daemon", "protocol"))
    done = subprocess.run(
        [str(python), "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (exit_codes.CONFIG, "")
    assert done.stderr.startswith("weightd: the daemon needs Python 3.10 or later, and ")
    assert f"{python} is 3.7: " in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "forks"),
    [
        (["serve"], True),
        (["-v", "run", "model.onnx"], True),
        (["serve", "--help"], False),
        (["check", "weightd.toml"], False),
        (["doctor"], False),
        (["--version"], False),
        ([], False),
    ],
)
def test_only_a_daemon_forks_a_zygote(monkeypatch: pytest.MonkeyPatch, arguments: list[str], forks: bool) -> None:
    monkeypatch.setattr(sys, "argv", ["weightd", *arguments])
    # With the tests as PID 1, `serve_as_init` would fork.
    monkeypatch.setattr("weightd_common.process_start.serve_as_init", lambda: None)
    with mock.patch("weightd_daemon.zmq_proxy.zygote.fork") as fork, mock.patch("weightd_daemon.cli.main") as main:
        __main__.main()
    assert fork.called == forks
    main.assert_called_once_with(zygote=fork.return_value if forks else None)


NO_NAME = "expected a model name of 1 to 64 ASCII letters"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["my model.onnx"], f"MODEL: 'my model' is not a valid model name; set --name: {NO_NAME}"),
        (["m.onnx", "--name", "my model"], f"--name: {NO_NAME}"),
        (["m.onnx", "--socket", "tcp://127.0.0.1:5555"], "--socket: expected ipc:///ABSOLUTE/PATH; tcp:// needs "),
        (["m.onnx", "--device", "cuda:0"], '--device[0]: expected "cpu", a set of cores such as "cpu:0" or a card '),
        (["m.onnx", "--workers", "0"], "--workers: expected integer, 1 to 1024, got int 0"),
        (["m.txt"], "MODEL: expected a file that ends in .onnx or .mindir, got "),
    ],
)
def test_argument_error_names_the_argument(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *arguments]) == exit_codes.USAGE
    [line] = capsys.readouterr().err.splitlines()
    assert line.removeprefix("weightd: ").startswith(error)
    assert line.endswith("GPUs are not supported") == ("cuda:0" in arguments)


@pytest.mark.parametrize(
    ("module", "status"),
    [
        ("zmq", -signal.SIGINT),  # while the program is imported
        ("waits", 130),  # while it runs, inside its context managers
    ],
)
def test_ctrl_c_exits_silently(module: str, status: int, tmp_path: Path) -> None:
    program = PROGRAM
    if module == "waits":
        program = "from weightd_daemon import cli; cli.ConfigFile = lambda *_: __import__('waits')\n" + program
    ended = interrupting.interrupted(program, "serve", "weightd.toml", where=module, directory=tmp_path)
    assert ended == (status, b"")
