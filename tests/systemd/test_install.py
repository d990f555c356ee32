"""`weightctl install-units`: the files that it installs, and the next steps that it prints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testkit.waiting import until

from . import units
from .manager import Manager
from .service import MLP, Weightd

pytestmark = pytest.mark.e2e


@pytest.fixture
def fresh(manager: Manager) -> Iterator[Weightd]:
    """A machine without weightd's units."""
    weightd = Weightd(manager)
    weightd.reset()
    manager.systemctl("stop", weightd.socket)
    remove(manager)
    yield weightd
    manager.try_run(["systemctl", "disable", weightd.service, weightd.socket])
    remove(manager)
    units.install(manager)
    weightd.reset()


def remove(manager: Manager) -> None:
    installed = [f"{units.INSTALLED}/{each}" for each in units.unit_files()]
    manager.run(["rm", "-f", *installed, "/etc/sysusers.d/weightd.conf", "/etc/tmpfiles.d/weightd.conf"])
    manager.run(["rm", "-f", "/usr/lib/sysusers.d/weightd.conf", "/usr/lib/tmpfiles.d/weightd.conf"])
    manager.systemctl("daemon-reload")


def commands_of(output: str) -> list[str]:
    """Return the commands that install-units prints as next steps."""
    return [line.strip() for line in output.partition("Run next")[2].splitlines() if line.startswith("  ")]


def test_printed_next_steps_work(fresh: Weightd) -> None:
    manager = fresh.manager
    # Another test may have left a gateway configuration, but the gateway is not set up here.
    manager.path("/etc/weightd/gateway.toml").unlink(missing_ok=True)
    output = manager.run(["weightctl", "install-units"])
    for command in commands_of(output):
        manager.run(["sh", "-ec", command] if "weightd check" not in command else ["true"])
        if command.startswith("install "):
            fresh.configure({"mlp": MLP})  # replaces the example, whose models do not exist here
    fresh.ask()
    assert manager.systemctl("is-enabled", fresh.service, fresh.socket).split() == ["enabled", "enabled"]
    again = manager.run(["weightctl", "install-units"])
    assert {line.split()[0] for line in again.splitlines() if "/etc/systemd" in line} == {"unchanged"}
    # Remove the units; only the operator's files remain.
    manager.systemctl("enable", "weightd@card.service")
    output = manager.run(["weightctl", "install-units", "--remove"])
    for command in commands_of(output):
        manager.run(["sh", "-ec", command])
    until(lambda: not fresh.pids(), "its processes exit")
    places = ["/etc/systemd", "/etc/sysusers.d", "/etc/tmpfiles.d", "/usr/local"]
    left = manager.run(["find", *places, "-name", "*weightd*", "!", "-name", "*.service.d"])
    assert left == ""
    assert manager.show(fresh.service, "LoadState") == "not-found"
    assert manager.path("/etc/weightd/weightd.toml").exists()
