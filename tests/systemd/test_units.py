"""The unit files: validity, sandboxing, and equality of the service and its template."""

from __future__ import annotations

import json
import re

import pytest

from weightd_daemon.doctor.service import read_unit

from . import units
from .manager import Manager

pytestmark = pytest.mark.e2e

# On a scale of 0 to 10, where 10 means no protection. The rest is the network, and the user namespace of the host.
MAX_EXPOSURE = 1.2

# Settings that clients and engines need to stay open, by their names in systemd-analyze(1).
OPEN = {
    "DeviceAllow",  # the clock, added by ProtectClock=
    "IPAddressDeny",  # localhost is allowed
    "PrivateNetwork",
    "PrivateUsers",
    "ProcSubset",
    "RestrictAddressFamilies_AF_INET_INET6",
    "RestrictAddressFamilies_AF_NETLINK",  # the gateway looks up the user of a local TCP connection
    "RestrictAddressFamilies_AF_UNIX",
    "RootDirectoryOrRootImage",
    "SystemCallFilter_resources",  # some of them
}

ANALYZE = ["systemd-analyze", "--man=no", "--no-pager"]


@pytest.mark.parametrize("unit", units.unit_files())
def test_units_are_valid(manager: Manager, unit: str) -> None:
    # With --recursive-errors=no, an unknown key is an error instead of a warning.
    done = manager.try_run([*ANALYZE, "verify", "--recursive-errors=no", f"{units.INSTALLED}/{unit}"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "unit", ["weightd.service", "weightd@.service", "weightd-gateway.service", "weightd-metrics.service"]
)
def test_exposure_of_units_is_low(manager: Manager, unit: str) -> None:
    command = [*ANALYZE, "security", "--offline=true", f"--threshold={MAX_EXPOSURE * 10:.0f}"]
    done = manager.try_run([*command, f"{units.INSTALLED}/{unit}"])
    assert done.returncode == 0, [line for line in done.stdout.splitlines() if line.startswith(("✗", "→"))]


@pytest.mark.parametrize(
    "unit", ["weightd.service", "weightd@.service", "weightd-gateway.service", "weightd-metrics.service"]
)
def test_only_listed_settings_are_exposed(manager: Manager, unit: str) -> None:
    found = manager.run([*ANALYZE, "security", "--offline=true", "--json=short", f"{units.INSTALLED}/{unit}"])
    exposed = {each["json_field"] for each in json.loads(found) if float(each["exposure"] or 0)}
    assert exposed <= OPEN


@pytest.mark.parametrize("kind", ["service", "socket"])
def test_template_unit_equals_plain_unit(kind: str) -> None:
    single = directives(f"weightd.{kind}")
    assert [without_instance(each) for each in directives(f"weightd@.{kind}")] == single


def directives(unit: str) -> list[str]:
    lines = (units.DIRECTORY / unit).read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def without_instance(line: str) -> str:
    """Return the directive of the template as it should be in the plain unit."""
    line = line.replace("weightd@%i.", "weightd.").replace(" (%i)", "").replace("/%i.sock", "/weightd.sock")
    return re.sub(r" serve \S*/%i\.toml$", " serve", line)


def test_example_drop_ins_are_valid(manager: Manager) -> None:
    examples = sorted((units.DIRECTORY / "examples").glob("*.d/*.conf"))
    assert examples
    for each in examples:
        unit = each.parent.name.removesuffix(".d")
        directory = manager.path("/run/examples")
        (directory / each.parent.name).mkdir(parents=True, exist_ok=True)
        (directory / unit).write_text((units.DIRECTORY / unit).read_text("utf-8"), "utf-8")
        (directory / each.parent.name / each.name).write_text(each.read_text("utf-8"), "utf-8")
        done = manager.try_run([*ANALYZE, "verify", "--recursive-errors=no", f"/run/examples/{unit}"])
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), each.name


def test_doctor_reads_unit_with_ascend_drop_in(manager: Manager) -> None:
    asked = read_unit("weightd.service", manager.root, manager.run)
    assert (asked.user, asked.hides_devices) == ("weightd", True)
    drop_ins = "/run/systemd/system/weightd.service.d"
    example = (units.DIRECTORY / "examples/weightd.service.d/ascend.conf").read_text("utf-8")
    manager.write(f"{drop_ins}/ascend.conf", example)
    manager.write("/run/more", 'ASCEND_RT_VISIBLE_DEVICES="1,2"\n')
    manager.write(f"{drop_ins}/more.conf", '[Service]\nEnvironmentFile=-/run/more\nEnvironment="WORDS=one two"\n')
    try:
        manager.systemctl("daemon-reload")
        asked = read_unit("weightd.service", manager.root, manager.run)
    finally:
        for each in ("ascend.conf", "more.conf"):
            manager.path(f"{drop_ins}/{each}").unlink()
        manager.systemctl("daemon-reload")
    assert not asked.hides_devices
    assert {"/dev/davinci0", "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"} <= set(
        asked.allowed_devices or ()
    )
    assert "HwHiAiUser" in asked.groups
    assert asked.environment["ASCEND_HOME_PATH"] == "/usr/local/Ascend/ascend-toolkit/latest"
    assert (asked.environment["ASCEND_RT_VISIBLE_DEVICES"], asked.environment["WORDS"]) == ("1,2", "one two")
    assert asked.environment["HOME"] == "/var/lib/weightd"
    with pytest.raises(OSError, match=r"systemd has no unit nothing\.service"):
        read_unit("nothing.service", manager.root, manager.run)


def test_users_and_groups_are_static_without_login(manager: Manager) -> None:
    user = manager.run(["getent", "passwd", "weightd"]).strip().split(":")
    assert int(user[2]) < 1000
    assert user[6].endswith("nologin")
    assert manager.run(["getent", "group", "weightd-clients"])
    assert manager.run(["id", "--groups", "--name", "weightd"]).split() == ["weightd"]
    groups = manager.run(["id", "--groups", "--name", "weightd-gateway"]).split()
    assert groups == ["weightd-gateway", "weightd-clients"]
