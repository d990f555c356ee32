"""The verdicts on what the service may open: its unit, and the device nodes. No I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence

from weightd_daemon.doctor.checks.finding import Finding, failed, passed, untestable
from weightd_daemon.doctor.facts.nodes import REQUIRED_NODES, DeviceNode
from weightd_daemon.doctor.facts.unit import ServiceUser, SystemdUnit

SERVICE = "service"
NODES = "device nodes"

_CARD_PATTERN = re.compile(r"/dev/v?davinci\d+")

CONTAINER_ADVICE = (
    "into a container: docker run --device /dev/davinciN "
    + " ".join(f"--device /dev/{name}" for name in REQUIRED_NODES)
    + " -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro -v /etc/ascend_install.info:/etc/ascend_install.info:ro"
    " --group-add GID-OF-THE-NODES; or by the Ascend Docker Runtime: -e ASCEND_VISIBLE_DEVICES=N"
)
_DROP_IN_ADVICE = (
    "install the drop-in weightd.service.d/ascend.conf (docs/operations.md, Cards), and look through it first"
)


def check_service(unit: SystemdUnit | OSError) -> Finding:
    """Whose environment, user and devices were judged, and whether a service gets to the cards at all."""
    if isinstance(unit, OSError):
        found = f"{unit}: this shell's environment and user were judged"
        return untestable(SERVICE, found, "for a service, on its host: weightd doctor --unit NAME")
    home = unit.environment.get("ASCEND_HOME_PATH", "not set")
    found = f"the environment of {unit.name} was judged: user {unit.user or 'root'}, ASCEND_HOME_PATH {home}"
    if unit.hides_devices:
        return failed(SERVICE, f"{found}; PrivateDevices=yes hides every card", _DROP_IN_ADVICE)
    denied_nodes = _denied_nodes(unit)
    if denied_nodes:
        return failed(SERVICE, f"{found}; DeviceAllow= lacks {', '.join(denied_nodes)}", _DROP_IN_ADVICE)
    if unit.unreadable_files:
        return untestable(
            SERVICE, f"{found}; {', '.join(unit.unreadable_files)} cannot be read", "run the doctor as root"
        )
    return passed(SERVICE, found)


def _denied_nodes(unit: SystemdUnit) -> list[str]:
    """The nodes that DeviceAllow= leaves out; what a class of devices ("char-...") contains is not known."""
    if unit.allowed_devices is None or any(each.startswith("char-") for each in unit.allowed_devices):
        return []
    has_card = any(_CARD_PATTERN.fullmatch(each) for each in unit.allowed_devices)
    needed = [f"/dev/{name}" for name in REQUIRED_NODES]
    return ["/dev/davinciN"] * (not has_card) + [each for each in needed if each not in unit.allowed_devices]


def check_device_nodes(nodes: Sequence[DeviceNode], identity: ServiceUser | OSError, group: str) -> Finding:
    """The driver's nodes are there, and open to whoever runs weightd.

    Args:
        nodes: what is there.
        identity: who that is, or why it is not known.
        group: that the driver was installed for, "" if not known.
    """
    cards = [each for each in nodes if _CARD_PATTERN.fullmatch(f"/dev/{each.name}")]
    if not cards:
        return untestable(NODES, "no /dev/davinciN", CONTAINER_ADVICE)
    missing = [name for name in REQUIRED_NODES if name not in {each.name for each in nodes}]
    if missing:
        return failed(
            NODES, f"no {', '.join(f'/dev/{name}' for name in missing)}", f"load the driver; {CONTAINER_ADVICE}"
        )
    if isinstance(identity, OSError):
        return untestable(NODES, f"whether the service may open them is unknown: {identity}", "create its user")
    denied_nodes = [each for each in nodes if each not in cards and not each.is_accessible_to(identity)]
    if not any(each.is_accessible_to(identity) for each in cards):
        denied_nodes = cards + denied_nodes
    if denied_nodes:
        group = group or denied_nodes[0].group_name
        advice = f"put {identity.name} into the group: usermod --append --groups {group} {identity.name}; for the "
        advice += (
            f"service, SupplementaryGroups={group} in the drop-in; for a container, --group-add {denied_nodes[0].gid}"
        )
        return failed(NODES, f"{identity.name} may not open {', '.join(map(str, denied_nodes))}", advice)
    return passed(NODES, f"{identity.name} may open {cards[0]} and {', '.join(REQUIRED_NODES)}")
