"""The units of one model: what their processes say while they come up, and the seat that they are then."""

from __future__ import annotations

from weightd.daemon.config.model import ModelConfig
from weightd.daemon.generations.actions import Role
from weightd.daemon.generations.life import Life
from weightd.daemon.generations.plan import CONCAT
from weightd.daemon.generations.unit import Unit
from weightd.daemon.models import rows
from weightd.daemon.models.deployment import Deployment
from weightd.daemon.models.ranks import rank_of
from weightd.daemon.requests.desk import Desk
from weightd.daemon.requests.lockstep import Lockstep
from weightd.protocol.messages.children import Broken, ChildMessage
from weightd.protocol.messages.ranks import Entered, Warmed


def heard(child: str, deployment: Deployment, generation: Life, desk: Desk, message: ChildMessage, now: float) -> None:
    """A child has said what only processes of units say, or one of a unit what none of these says."""
    what = type(message).__name__.lower()
    match generation, message:
        case Unit(), Entered():
            generation.entered(child, message, now)
            difference = "" if generation.built is None else desk.signature.differs(generation.built)
            if difference:
                generation.failed(f"the new model is not a drop-in for the one that serves: {difference}", now)
            deployment.told(generation, message.device, _rank(generation, child))
        case Unit(), Warmed():
            generation.warmed(child, message, now)
            deployment.told(generation, message.device, _rank(generation, child))
        case Unit(), _:
            generation.astray(child, what, now)
        case _:
            generation.broken(child, Broken(f"it said {what}, and is of no unit"), now)


def enlist(unit: Unit, config: ModelConfig, desk: Desk, now: float) -> None:
    """Let all ranks together take requests."""
    for seat, processes in unit.seats.items():
        reply = None if unit.ranks.reply == CONCAT else processes[unit.ranks.reply]
        others = [each.name for each in unit.children.values() if each.role is Role.BROKER]
        lockstep = Lockstep(processes, reply, unit.step)
        desk.enlist_ranks(seat, lockstep, now, others=others, device=unit.device, terms=rows.terms(config, unit))


def _rank(unit: Unit, child: str) -> int:
    there = unit.children.get(child)
    return (rank_of(there) or 0) if there is not None else 0
