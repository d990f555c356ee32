"""Tests of `weightctl install-units` with a fake weightd program, because there is no daemon on Python 3.7."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

import pytest

from weightctl import exit_codes
from weightctl.cli import main
from weightctl.install import plan
from weightctl.install.plan import FileState

REPOSITORY = Path(__file__).parents[2]
WEIGHTD = Path("/opt/weightd/bin/weightd")


# Units of an invented release.
NEW = {
    "new.service": "[Service]\nExecStart=/usr/bin/weightd serve\n\n[Install]\nWantedBy=x\n",
    "new.socket": "[Socket]\n\n[Install]\nWantedBy=x\n",
    "new@.service": "[Service]\nExecStart=/usr/bin/weightd serve %i\n\n[Install]\nWantedBy=x\n",
    "new.slice": "[Slice]\n",
    "README": "no unit",
    "sysusers.d/new.conf": "u new -\n",
    "tmpfiles.d/new.conf": "d /run/new\n",
    "examples/new.service.d/card.conf": "[Service]\n",
}
MANUAL = ("man/weightd.8", "man/weightd.toml.5", "completions/weightd", "examples/weightd.toml")


def write(directory: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """Return a directory with units that no release has."""
    return write(tmp_path / "units", NEW)


@pytest.fixture
def manual(tmp_path: Path) -> Path:
    return write(tmp_path / "manual", dict.fromkeys(MANUAL, "text\n"))


@pytest.fixture
def weightd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the fake program for the units."""
    path = tmp_path / "bin" / "weightd"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(path.with_name("weightctl"))])
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


class Install:
    """Runs `weightctl install-units`."""

    def __init__(self, capsys: pytest.CaptureFixture[str], root: Path) -> None:
        self._capsys = capsys
        self._root = root

    def __call__(self, *arguments: str) -> Tuple[int, str, str]:
        status = main(["install-units", "--prefix", str(self._root), *arguments])
        captured = self._capsys.readouterr()
        return status, captured.out, captured.err

    def states(self, *arguments: str) -> Dict[str, str]:
        """Return the state of each file by its path below the root."""
        out = json.loads(self("--json", *arguments)[1])
        return {str(Path(each["path"]).relative_to(self._root)): each["state"] for each in out["files"]}


@pytest.fixture
def install(capsys: pytest.CaptureFixture[str], root: Path, weightd: Path) -> Install:
    assert weightd.exists()
    return Install(capsys, root)


def tree(directory: Path) -> List[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.glob("**/*") if not path.is_dir())


def test_removes_installed_files(install: Install, root: Path) -> None:
    wants = root / "etc/systemd/system/x.wants"
    install()
    wants.mkdir()
    for link in ("weightd.service", "weightd@.service", "other.service"):
        (wants / link.replace("@", "@card")).symlink_to(f"/etc/systemd/system/{link}")
    for kept in ("etc/weightd/weightd.toml", "etc/systemd/system/weightd.service.d/mine.conf"):
        (root / kept).parent.mkdir()
        (root / kept).write_bytes(OURS)
    (root / "etc/systemd/system/weightd.slice").write_text("an operator's own\n")
    before = tree(root)
    assert {*install.states("--remove", "--dry-run").values()} == {"removed", "kept"}
    assert tree(root) == before
    states = install.states("--remove")
    left = [
        "etc/systemd/system/weightd.service.d/mine.conf",
        "etc/systemd/system/weightd.slice",
        "etc/systemd/system/x.wants/other.service",
        "etc/weightd/weightd.toml",
    ]
    assert [path for path, state in sorted(states.items()) if state == "kept"] == left[1:2]
    assert tree(root) == left
    assert not (root / "usr/local/share/doc/weightd").exists()
    status, out, err = install("--remove")
    assert (status, out.split("\n")[0].split()[0]) == (exit_codes.ERROR, "kept")
    assert "systemctl stop" in out
    assert "not removed: /etc/weightd, drop-ins" in err
    (root / "etc/systemd/system/weightd.slice").unlink()
    assert install("--remove")[0] == exit_codes.OK


# --- the plan -------------------------------------------------------------------------------------------------------


def test_plan_maps_files_to_directories(units: Path, manual: Path) -> None:
    assert [str(each.path) for each in plan.make_plan(units, manual, WEIGHTD)] == [
        "/etc/systemd/system/new.service",
        "/etc/systemd/system/new.slice",
        "/etc/systemd/system/new.socket",
        "/etc/systemd/system/new@.service",
        "/etc/sysusers.d/new.conf",
        "/etc/tmpfiles.d/new.conf",
        "/usr/local/share/bash-completion/completions/weightd",
        "/usr/local/share/doc/weightd/examples/new.service.d/card.conf",
        "/usr/local/share/doc/weightd/examples/weightd.toml",
        "/usr/local/share/man/man5/weightd.toml.5",
        "/usr/local/share/man/man8/weightd.8",
    ]
    # Sockets come first, and units without an [Install] section are not enabled.
    assert plan.units_to_enable(plan.make_plan(units, manual, WEIGHTD)) == ["new.socket", "new.service"]


@pytest.mark.parametrize(
    ("line", "installed"),
    [
        ("ExecStart=/usr/bin/weightd serve", "ExecStart=/opt/weightd/bin/weightd serve"),
        ("ExecStartPre=-/usr/bin/weightd check x", "ExecStartPre=-/opt/weightd/bin/weightd check x"),
        ("ExecReload=/usr/bin/weightctl reload", "ExecReload=/opt/weightd/bin/weightctl reload"),
        ("ExecStart=/bin/sh -c '/usr/bin/weightd x'", "ExecStart=/bin/sh -c '/opt/weightd/bin/weightd x'"),
        ("ExecStart=/usr/bin/weightd-other", "ExecStart=/usr/bin/weightd-other"),
        ("# ExecStart=/usr/bin/weightd", "# ExecStart=/usr/bin/weightd"),
    ],
)
def test_units_start_installed_program(units: Path, manual: Path, line: str, installed: str) -> None:
    (units / "new.service").write_text(f"[Service]\n{line}\n")
    [unit] = [each for each in plan.make_plan(units, manual, WEIGHTD) if each.path.name == "new.service"]
    assert unit.content.decode().splitlines()[2] == installed


def test_each_file_has_a_marker_comment(units: Path, manual: Path) -> None:
    for each in plan.make_plan(units, manual, WEIGHTD):
        first = each.content.decode().splitlines()[0]
        assert plan.is_ours(each.content)
        comment = '.\\"' if "/man/" in str(each.path) else "#"
        marker = "From the examples of" if "/examples/" in str(each.path) else "Written by"
        assert first.startswith(f"{comment} {marker} weightctl install-units")
        assert ("systemctl edit" in first) == (each.path.parent.name == "system")


def test_finds_units_of_repository(manual: Path) -> None:
    assert [plan.source(name) for name in ("systemd", "manual")] == [REPOSITORY / "systemd", REPOSITORY / "manual"]
    planned = plan.make_plan(plan.source("systemd"), manual, WEIGHTD)
    starting = [each for each in planned if b"\nExecStart=" in each.content]
    assert "weightd.service" in [each.path.name for each in starting]
    for each in starting:
        verbs = {"weightd-gateway.service": b"weightd gateway", "weightd-metrics.service": b"weightctl metrics"}
        verb = verbs.get(each.path.name, b"weightd serve")
        assert b"\nExecStart=/opt/weightd/bin/" + verb in each.content


# --- files ----------------------------------------------------------------------------------------------------------

OURS = plan.add_notice(Path("etc/x.service"), b"text\n")


def test_states_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "x.service"
    old_mask = os.umask(0o077)
    try:
        assert plan.compare(path, OURS) is FileState.NEW
        assert plan.install(path, OURS) is FileState.NEW
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
    before = path.stat().st_ino
    assert plan.install(path, OURS) is FileState.UNCHANGED
    assert path.stat().st_ino == before
    assert plan.install(path, OURS + b"more\n") is FileState.CHANGED
    assert path.read_bytes() == OURS + b"more\n"
    assert tree(tmp_path) == ["a/b/x.service"]


def test_keeps_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "x.service"
    (tmp_path / "linked").write_bytes(OURS)
    for made in (
        lambda: path.write_text("an operator's own\n"),
        lambda: path.symlink_to("/dev/null"),  # systemctl mask
        lambda: path.symlink_to("linked"),  # systemctl link
    ):
        made()
        before = (path.is_symlink(), path.read_bytes())
        assert plan.install(path, OURS + b"more\n") is FileState.FOREIGN
        assert (path.is_symlink(), path.read_bytes()) == before
        path.unlink()
    path.mkdir()
    assert plan.install(path, OURS) is FileState.FOREIGN


def test_failed_write_keeps_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.service"
    plan.install(path, OURS)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(plan.InstallError, match=f"^{path}: No space left on device$") as caught:
        plan.install(path, OURS + b"more\n")
    assert caught.value.status == exit_codes.CANNOT_WRITE
    assert path.read_bytes() == OURS
    assert tree(tmp_path) == ["x.service"]


# --- the command
# -------------------------------------------------------------------------------------------------------


def test_installs_below_root_and_prints_next_steps(install: Install, root: Path, weightd: Path) -> None:
    status, out, err = install()
    assert status == exit_codes.OK
    assert f"new        {root}/etc/systemd/system/weightd.service\n" in out
    assert {line.split()[0] for line in out.partition("\n\n")[0].splitlines()} == {"new"}
    assert f"ExecStart={weightd} serve" in (root / "etc/systemd/system/weightd.service").read_text()
    assert "weightctl" in (root / "usr/local/share/man/man1/weightctl.1").read_text()
    assert (root / "usr/local/share/bash-completion/completions/weightctl").exists()
    steps = [line.strip() for line in out.splitlines() if line.startswith("  ") and not line.startswith("  #")]
    assert steps == [
        "systemd-sysusers weightd.conf && systemd-tmpfiles --create weightd.conf",
        "systemctl daemon-reload",
        "install -D -m 644 /usr/local/share/doc/weightd/examples/weightd.toml /etc/weightd/weightd.toml",
        "systemctl enable --now weightd.socket weightd.service",
    ]
    # The unit hides this directory from the service.
    assert "the service cannot access /tmp" in err


UNIT = "etc/systemd/system/weightd.service"


def test_second_run_updates_only_own_files(install: Install, root: Path) -> None:
    install()
    states = install.states()
    assert {*states.values()} == {"unchanged"}
    content = (root / UNIT).read_text()
    own = {
        "etc/systemd/system/weightd.slice": "mine",
        f"{UNIT}.d/mine.conf": "mine",
        "etc/weightd/weightd.toml": "mine",
    }
    write(root, {UNIT: content.replace("ExecStart=", "ExecStart=/old"), **own})
    status, out, err = install("--dry-run")
    assert status == exit_codes.ERROR
    assert "  systemctl try-restart weightd.service weightd-gateway.service weightd-metrics.service\n" in out
    assert "install -D" not in out, "there is a configuration"
    assert f"weightctl: {root}/etc/systemd/system/weightd.slice was kept" in err
    assert install.states() == {**states, UNIT: "changed", "etc/systemd/system/weightd.slice": "kept"}
    assert (root / UNIT).read_text() == content
    assert {name: (root / name).read_text() for name in own} == own
    assert "try-restart" not in install()[1]


def test_enables_gateway_with_configuration(install: Install, root: Path) -> None:
    assert "weightd-gateway" not in install()[1].partition("\nNext")[2]
    write(root, {"etc/weightd/gateway.toml": "mine"})
    assert "  systemctl enable --now weightd-gateway.socket weightd-gateway.service\n" in install()[1]


def test_dry_run_writes_nothing(install: Install, root: Path) -> None:
    status, out, err = install("--dry-run")
    states = install.states("--dry-run")
    assert (status, states[UNIT], {*states.values()}, root.exists()) == (exit_codes.OK, "new", {"new"}, False)
    assert "nothing was changed" in err
    assert install()[1] == out
    result = json.loads(install("--json")[1])
    assert "systemctl daemon-reload" in result["next"]
    assert [note for note in result["notes"] if "cannot access" in note]


def test_without_permission(install: Install, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def refuse(path: Path, *arguments: Any, **options: Any) -> None:
        if path == root:
            raise PermissionError(13, "Permission denied")
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    status, out, err = install()
    assert (status, out) == (exit_codes.NO_PERMISSION, "")
    path = f"{root}/etc/systemd/system/weightd-gateway.service"
    assert err == f"PERMISSION_DENIED: {path}: Permission denied; run this as root, with sudo\n"


def test_unreadable_files(install: Install, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Path) -> bytes:
        raise OSError(5, "Input/output error", "/x")

    monkeypatch.setattr(Path, "read_bytes", broken)
    status, out, err = install()
    assert (status, out, root.exists()) == (exit_codes.CANNOT_WRITE, "", False)
    assert err == "INTERNAL: cannot prepare the files: [Errno 5] Input/output error: '/x'\n"


# --- the program ----------------------------------------------------------------------------------------------------


def test_without_weightd(install: Install, weightd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weightd.unlink()
    monkeypatch.setattr(sys, "executable", str(weightd.with_name("python")))
    monkeypatch.setattr("sysconfig.get_path", {"scripts": str(weightd.parent)}.get)
    status, out, err = install()
    assert (status, out) == (exit_codes.UNAVAILABLE, "")
    assert err.startswith(f"UNAVAILABLE: there is no weightd in {weightd.parent}; the daemon needs Python 3.10")


def test_rejects_path_with_systemd_specifiers(weightd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = weightd.parent.with_name("100% mine")
    weightd.parent.rename(odd)
    monkeypatch.setattr(sys, "argv", [str(odd / "weightctl")])
    with pytest.raises(plan.NoProgram, match="100% mine/weightd: expected a path of"):
        plan.find_weightd()


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (
            "echo Traceback >&2; echo 'ModuleNotFoundError: x' >&2; exit 1",
            "does not run on .*: ModuleNot.* x; the daemon",
        ),
        ("exit 3", "does not run on .*: exit status 3; the daemon needs"),
    ],
)
def test_daemon_that_does_not_run(install: Install, root: Path, weightd: Path, script: str, cause: str) -> None:
    weightd.write_text(f"#!/bin/sh\n{script}\n")
    status, _, err = install()
    assert (status, root.exists()) == (exit_codes.UNAVAILABLE, False)
    assert re.search(cause, err)


def test_runs_the_program(weightd: Path, tmp_path: Path) -> None:
    weightd.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n')
    plan.check_runs(weightd)
    assert (tmp_path / "arguments").read_text() == "--version\n"
    weightd.write_text("#!/no/interpreter\n")
    with pytest.raises(plan.NoProgram, match="No such file"):
        plan.check_runs(weightd)


def test_finds_directory_hidden_from_service() -> None:
    assert plan.hidden_directory(Path("/home/somebody/weightd/bin/weightd")) == "/home"
