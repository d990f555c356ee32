"""The units of one model: what their processes say while they come up, and the slot that they are then."""

from __future__ import annotations

from weightd_daemon.config.model import ModelConfig
from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.rank_group import RankGroup
from weightd_daemon.generations.spec import CONCAT
from weightd_daemon.models import batching
from weightd_daemon.models.deployment import Deployment
from weightd_daemon.models.rank_rendezvous import rank_number
from weightd_daemon.scheduling.dispatcher import Dispatcher
from weightd_daemon.scheduling.lockstep import LockstepTracker
from weightd_protocol.codec import type_name
from weightd_protocol.messages.ranks import JoinedGroup, SelfTestDone
from weightd_protocol.messages.worker import ChildMessage, ProcessFailed


def on_message(
    child: str,
    deployment: Deployment,
    generation: GenerationBase,
    dispatcher: Dispatcher,
    message: ChildMessage,
    now: float,
) -> None:
    """A child has said what only processes of units say, or one of a unit what none of these says."""
    message_name = type_name(message)
    match generation, message:
        case RankGroup(), JoinedGroup():
            generation.on_joined(child, message, now)
            difference = "" if generation.built is None else dispatcher.signature.difference(generation.built)
            if difference:
                generation.fail(f"the new model is not a drop-in for the one that serves: {difference}", now)
            deployment.on_device_memory(generation, message.device, _rank_of_process(generation, child))
        case RankGroup(), SelfTestDone():
            generation.on_selftest_done(child, message, now)
            deployment.on_device_memory(generation, message.device, _rank_of_process(generation, child))
        case RankGroup(), _:
            generation.on_unexpected_message(child, message_name, now)
        case _:
            generation.on_process_failed(
                child, ProcessFailed(f"it sent {message_name}, and belongs to no rank group"), now
            )


def add_slot(generation: RankGroup, config: ModelConfig, dispatcher: Dispatcher, now: float) -> None:
    """Let all ranks together take requests."""
    for slot, processes in generation.slots.items():
        reply = None if generation.group_spec.reply_rank == CONCAT else processes[generation.group_spec.reply_rank]
        others = [each.name for each in generation.children.values() if each.role is Role.BROKER]
        lockstep = LockstepTracker(processes, reply, generation.step)
        dispatcher.add_rank_slot(
            slot,
            lockstep,
            now,
            support_processes=others,
            device=generation.device,
            policy=batching.batching_policy(config, generation),
        )


def _rank_of_process(generation: RankGroup, child: str) -> int:
    process = generation.children.get(child)
    return (rank_number(process) or 0) if process is not None else 0
