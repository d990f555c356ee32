"""The verdicts on what the service may open: its unit, and the device nodes. No I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence

from weightd.daemon.doctor.facts.nodes import NEEDED, Node
from weightd.daemon.doctor.facts.unit import Identity, Unit
from weightd.daemon.doctor.verdicts.finding import Finding, failed, passed, untestable

SERVICE = "service"
NODES = "device nodes"

_CARD = re.compile(r"/dev/v?davinci\d+")

CONTAINER = (
    "into a container: docker run --device /dev/davinciN "
    + " ".join(f"--device /dev/{name}" for name in NEEDED)
    + " -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro -v /etc/ascend_install.info:/etc/ascend_install.info:ro"
    " --group-add GID-OF-THE-NODES; or by the Ascend Docker Runtime: -e ASCEND_VISIBLE_DEVICES=N"
)
_DROP_IN = "install the drop-in weightd.service.d/ascend.conf (docs/operations.md, Cards), and look through it first"


def service(unit: Unit | OSError) -> Finding:
    """Whose environment, user and devices were judged, and whether a service gets to the cards at all."""
    if isinstance(unit, OSError):
        found = f"{unit}: this shell's environment and user were judged"
        return untestable(SERVICE, found, "for a service, on its host: weightd doctor --unit NAME")
    home = unit.environment.get("ASCEND_HOME_PATH", "not set")
    found = f"the environment of {unit.name} was judged: user {unit.user or 'root'}, ASCEND_HOME_PATH {home}"
    if unit.hides_devices:
        return failed(SERVICE, f"{found}; PrivateDevices=yes hides every card", _DROP_IN)
    shut = _shut(unit)
    if shut:
        return failed(SERVICE, f"{found}; DeviceAllow= lacks {', '.join(shut)}", _DROP_IN)
    if unit.unread:
        return untestable(SERVICE, f"{found}; {', '.join(unit.unread)} cannot be read", "run the doctor as root")
    return passed(SERVICE, found)


def _shut(unit: Unit) -> list[str]:
    """The nodes that DeviceAllow= leaves out; what a class of devices ("char-...") contains is not known."""
    if unit.allowed is None or any(each.startswith("char-") for each in unit.allowed):
        return []
    has_card = any(_CARD.fullmatch(each) for each in unit.allowed)
    needed = [f"/dev/{name}" for name in NEEDED]
    return ["/dev/davinciN"] * (not has_card) + [each for each in needed if each not in unit.allowed]


def device_nodes(nodes: Sequence[Node], identity: Identity | OSError, group: str) -> Finding:
    """The driver's nodes are there, and open to whoever runs weightd.

    Args:
        nodes: what is there.
        identity: who that is, or why it is not known.
        group: that the driver was installed for, "" if not known.
    """
    cards = [each for each in nodes if _CARD.fullmatch(f"/dev/{each.name}")]
    if not cards:
        return untestable(NODES, "no /dev/davinciN", CONTAINER)
    missing = [name for name in NEEDED if name not in {each.name for each in nodes}]
    if missing:
        return failed(NODES, f"no {', '.join(f'/dev/{name}' for name in missing)}", f"load the driver; {CONTAINER}")
    if isinstance(identity, OSError):
        return untestable(NODES, f"whether the service may open them is unknown: {identity}", "create its user")
    shut = [each for each in nodes if each not in cards and not each.opens_to(identity)]
    if not any(each.opens_to(identity) for each in cards):
        shut = cards + shut
    if shut:
        group = group or shut[0].group
        advice = f"put {identity.name} into the group: usermod --append --groups {group} {identity.name}; for the "
        advice += f"service, SupplementaryGroups={group} in the drop-in; for a container, --group-add {shut[0].gid}"
        return failed(NODES, f"{identity.name} may not open {', '.join(map(str, shut))}", advice)
    return passed(NODES, f"{identity.name} may open {cards[0]} and {', '.join(NEEDED)}")
