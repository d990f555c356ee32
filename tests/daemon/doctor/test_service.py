from __future__ import annotations

import os
from pathlib import Path

import pytest

from weightd_daemon.doctor import service
from weightd_daemon.doctor.service import SystemdUnit

from .hosts import no_program

# Output of systemctl show of systemd 252 for the unit with the drop-in for cards.
SHOWN = """\
LoadState=loaded
Environment=HOME=/var/lib/weightd ASCEND_HOME_PATH=/opt/cann "NOTE=two words"
EnvironmentFiles=/etc/default/weightd (ignore_errors=yes)
EnvironmentFiles=/etc/default/gone (ignore_errors=yes)
User=nobody
Group=daemon
SupplementaryGroups=video 4242
PrivateDevices=no
DevicePolicy=closed
DeviceAllow=/dev/davinci0 rw
DeviceAllow=/dev/davinci_manager rw
"""


def test_reads_properties_of_unit(tmp_path: Path) -> None:
    (tmp_path / "etc/default").mkdir(parents=True)
    (tmp_path / "etc/default/weightd").write_text("# a comment\nASCEND_HOME_PATH='/opt/other'\n\nVISIBLE=1,2\n")

    def run(argv: list[str]) -> str:
        assert [*argv[:2], *argv[-2:]] == ["systemctl", "show", "--", "weightd@a.service"]
        return SHOWN

    seen = service.read_unit("weightd@a.service", tmp_path, run)
    assert dict(seen.environment) == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin",
        "HOME": "/var/lib/weightd",
        "NOTE": "two words",
        "ASCEND_HOME_PATH": "/opt/other",
        "VISIBLE": "1,2",
    }
    assert (seen.unreadable_files, seen.user) == (("/etc/default/gone",), "nobody")
    assert seen.groups == ("daemon", "video", "4242")
    assert (seen.hides_devices, seen.allowed_devices) == (False, ("/dev/davinci0", "/dev/davinci_manager"))
    user = service.user_of(seen)
    assert isinstance(user, service.ServiceUser)
    assert (user.name, user.uid, 4242 in user.gids) == ("nobody", 65534, True)


def test_unit_without_user_runs_as_root(tmp_path: Path) -> None:
    text = "LoadState=loaded\nUser=\nDevicePolicy=auto\nPrivateDevices=no\n"
    seen = service.read_unit("weightd.service", tmp_path, lambda _: text)
    assert (seen.user, seen.allowed_devices, seen.hides_devices, set(seen.environment)) == ("", None, False, {"PATH"})
    root, own = service.user_of(seen), service.user_of(OSError("no unit"))
    assert isinstance(root, service.ServiceUser)
    assert isinstance(own, service.ServiceUser)
    assert (root.uid, own.uid, os.getegid() in own.gids) == (0, os.geteuid(), True)


def test_missing_unit_is_reported(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="systemd has no unit x"):
        service.read_unit("x", tmp_path, lambda _: "LoadState=not-found\n")
    with pytest.raises(OSError, match="no unit was named"):
        service.read_unit("", tmp_path, no_program)
    assert "nobody-here" in str(service.user_of(SystemdUnit("x", user="nobody-here")))


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["/nonexistent/npu-smi"], "is not on PATH"),
        (["/bin/sh", "-c", "echo dcmi error; exit 255"], "exited with status 255: dcmi error"),
        (["/bin/sleep", "60"], "did not end within 0.2 s"),
    ],
)
def test_failing_command_is_reported(monkeypatch: pytest.MonkeyPatch, argv: list[str], problem: str) -> None:
    if "sleep" in argv[0]:
        monkeypatch.setattr(service, "_COMMAND_TIMEOUT_S", 0.2)
    with pytest.raises(OSError, match=problem):
        service.run_for_output(argv)
