"""Whose environment, user and device nodes count: what systemd and /dev say, and the verdicts on it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weightd_daemon.doctor import access
from weightd_daemon.doctor import access as access_checks
from weightd_daemon.doctor.access import REQUIRED_NODES, DeviceNode, ServiceUser, SystemdUnit
from weightd_daemon.doctor.findings import CheckResult, Finding

ALICE = ServiceUser("alice", 1000, frozenset({1000, 1100}))
# As systemd 252 prints the unit with its drop-in for cards.
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


def test_what_systemd_says_of_a_unit(tmp_path: Path) -> None:
    (tmp_path / "etc/default").mkdir(parents=True)
    (tmp_path / "etc/default/weightd").write_text("# a comment\nASCEND_HOME_PATH='/opt/other'\n\nVISIBLE=1,2\n")

    def run(argv: list[str]) -> str:
        assert [*argv[:2], *argv[-2:]] == ["systemctl", "show", "--", "weightd@a.service"]
        return SHOWN

    seen = access.read_unit("weightd@a.service", tmp_path, run)
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
    identity = access.service_user(seen)
    assert (identity.name, identity.uid, 4242 in identity.gids) == ("nobody", 65534, True)


def test_a_unit_that_says_nothing_is_roots_and_opens_all() -> None:
    text = "LoadState=loaded\nUser=\nDevicePolicy=auto\nPrivateDevices=no\n"
    seen = access.read_unit("weightd.service", run_command=lambda _: text)
    assert (seen.user, seen.allowed_devices, seen.hides_devices, set(seen.environment)) == ("", None, False, {"PATH"})
    assert access.service_user(seen).uid == 0


def test_no_unit() -> None:
    with pytest.raises(OSError, match="systemd has no unit x"):
        access.read_unit("x", run_command=lambda _: "LoadState=not-found\n")
    with pytest.raises(OSError, match="no unit was named"):
        access.read_unit("")
    with pytest.raises(OSError, match="nobody-here"):
        access.service_user(SystemdUnit("x", user="nobody-here"))
    own = access.current_user()
    assert (own.uid, os.getegid() in own.gids) == (os.geteuid(), True)


def verdict(finding: Finding, expected: CheckResult, *texts: str) -> None:
    assert finding.result is expected, finding
    assert [text for text in texts if text not in f"{finding.detail} -> {finding.advice}"] == [], finding
    assert bool(finding.advice) is (expected is not CheckResult.PASS)


OPEN = ("/dev/davinci3", *(f"/dev/{name}" for name in REQUIRED_NODES))


@pytest.mark.parametrize(
    ("seen", "expected", "text"),
    [
        (OSError("no systemd"), CheckResult.NOT_TESTABLE, "no systemd: this shell's environment and user were judged"),
        (
            SystemdUnit("u", {"ASCEND_HOME_PATH": "/c"}, user="weightd"),
            CheckResult.PASS,
            "user weightd, ASCEND_HOME_PATH /c",
        ),
        (
            SystemdUnit("u", allowed_devices=OPEN),
            CheckResult.PASS,
            "environment of u was judged: user root, ASCEND_HOME_PATH not set",
        ),
        (SystemdUnit("u", allowed_devices=("char-davinci",)), CheckResult.PASS, "u was judged"),
        (
            SystemdUnit("u", hides_devices=True),
            CheckResult.FAIL,
            "PrivateDevices=yes hides every card -> install the drop-in",
        ),
        (SystemdUnit("u", allowed_devices=OPEN[1:]), CheckResult.FAIL, "DeviceAllow= lacks /dev/davinciN -> "),
        (SystemdUnit("u", allowed_devices=OPEN[:-1]), CheckResult.FAIL, "DeviceAllow= lacks /dev/hisi_hdc -> "),
        (
            SystemdUnit("u", unreadable_files=("/etc/x",)),
            CheckResult.NOT_TESTABLE,
            "/etc/x cannot be read -> run the doctor as root",
        ),
    ],
)
def test_whose_environment_was_judged(seen: SystemdUnit | OSError, expected: CheckResult, text: str) -> None:
    verdict(access_checks.check_service(seen), expected, text)


def dev(mode: int = 0o660, *, gid: int = 1100, without: str = "") -> list[DeviceNode]:
    return [DeviceNode(name, mode, 0, gid) for name in ("davinci0", *REQUIRED_NODES) if name != without]


@pytest.mark.parametrize(
    ("seen", "expected", "texts"),
    [
        (dev(), CheckResult.PASS, ["alice may open /dev/davinci0 (0660, group 1100)"]),
        (dev(0o666, gid=0), CheckResult.PASS, ["alice may open"]),
        (
            [],
            CheckResult.NOT_TESTABLE,
            ["no /dev/davinciN", "docker run --device /dev/davinciN", "--device /dev/hisi_hdc"],
        ),
        (dev(without="devmm_svm"), CheckResult.FAIL, ["no /dev/devmm_svm", "load the driver", "docker run"]),
        (
            dev(gid=7777),
            CheckResult.FAIL,
            ["alice may not open /dev/davinci0 (0660, group 7777)", "--groups npus alice"],
        ),
        (dev(0o640), CheckResult.FAIL, ["may not open", "SupplementaryGroups=npus", "--group-add 1100"]),
        ([*dev(), DeviceNode("davinci1", 0o600, 0, 0)], CheckResult.PASS, ["alice may open /dev/davinci0"]),
        (
            [*dev(without="hisi_hdc"), DeviceNode("hisi_hdc", 0o600, 0, 0)],
            CheckResult.FAIL,
            ["may not open /dev/hisi_hdc (0600"],
        ),
    ],
)
def test_the_nodes_and_who_may_open_them(seen: list[DeviceNode], expected: CheckResult, texts: list[str]) -> None:
    verdict(access_checks.check_device_nodes(seen, ALICE, "npus"), expected, *texts)


def test_root_may_open_all_and_one_who_is_not_there_nothing() -> None:
    verdict(access_checks.check_device_nodes(dev(0, gid=0), ServiceUser("root", 0, frozenset()), ""), CheckResult.PASS)
    finding = access_checks.check_device_nodes(dev(), OSError("u: no such user"), "")
    verdict(finding, CheckResult.NOT_TESTABLE, "u: no such user")


def test_the_nodes_are_looked_at(tmp_path: Path) -> None:
    assert access.read_device_nodes(tmp_path) == ()
    (tmp_path / "dev").mkdir()
    for name in ("davinci0", "null", *REQUIRED_NODES):
        (tmp_path / "dev" / name).touch(0o640)
        (tmp_path / "dev" / name).chmod(0o640)
    seen = access.read_device_nodes(tmp_path)
    assert [each.name for each in seen] == sorted(["davinci0", *REQUIRED_NODES])
    assert {(each.mode, each.uid) for each in seen} == {(0o640, os.getuid())}
