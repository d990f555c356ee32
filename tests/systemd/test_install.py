"""`weightctl install-units`: what it writes and what it says to do next make weightd a service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import units
from .manager import Manager
from .service import MLP, Weightd

pytestmark = pytest.mark.e2e


@pytest.fixture
def fresh(manager: Manager) -> Iterator[Weightd]:
    """A machine that does not know weightd."""
    weightd = Weightd(manager)
    weightd.reset()
    manager.systemctl("stop", weightd.socket)
    remove(manager)
    yield weightd
    weightd.reset()
    manager.systemctl("disable", weightd.service, weightd.socket)
    remove(manager)
    units.install(manager)


def remove(manager: Manager) -> None:
    installed = [f"{units.INSTALLED}/{each}" for each in units.unit_files()]
    manager.run(["rm", "-f", *installed, "/etc/sysusers.d/weightd.conf", "/etc/tmpfiles.d/weightd.conf"])
    manager.run(["rm", "-f", "/usr/lib/sysusers.d/weightd.conf", "/usr/lib/tmpfiles.d/weightd.conf"])
    manager.systemctl("daemon-reload")


def test_what_it_says_to_do_next_works_as_it_is_written(fresh: Weightd) -> None:
    manager = fresh.manager
    said = manager.run(["weightctl", "install-units"])
    commands = [line.strip() for line in said.partition("Next")[2].splitlines() if line.startswith("  ")]
    for command in commands:
        manager.run(["sh", "-ec", command] if "weightd check" not in command else ["true"])
        if command.startswith("install "):
            fresh.configure({"mlp": MLP})  # in place of the example, which names models that are not there
    fresh.ask()
    assert manager.systemctl("is-enabled", fresh.service, fresh.socket).split() == ["enabled", "enabled"]
    again = manager.run(["weightctl", "install-units"])
    assert {line.split()[0] for line in again.splitlines() if "/etc/systemd" in line} == {"unchanged"}
