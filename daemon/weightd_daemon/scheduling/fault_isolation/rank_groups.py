"""Groups of ranks that were lost, and what that says of what they ran.

Why a group is lost is seldom known at once: if one of its processes is killed or stopped from outside, the others fail
or wait in vain, and they may be heard of first. So whatever it was, that it was lost while it ran a request is only
held against this; the second one that is lost to the same request ends it. And it is forgiven if a process of the
group turns out to have been ended from outside: then that was why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator
from weightd_daemon.scheduling.batch import Batch
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.slots import Slot
from weightd_protocol.errors import RequestError, Unavailable

# A request that so many groups were lost to is held to be the cause.
MAX_LOST_GROUPS = 2


class GroupLoss(NamedTuple):
    """Why a group is lost, and the error in which a request ends that was the cause; None: no request was."""

    reason: str
    error_type: type[RequestError] | None


@dataclass(eq=False, slots=True)
class _LostGroup:
    """A group that was lost while it ran a request, of which not all processes have ended."""

    request: Request
    is_forgiven: bool = False


class RankGroupFailures:
    """The groups of one model that were lost.

    Args:
        max_losses: whatever ends the groups that run a request, this is the last one.
    """

    def __init__(self, max_losses: int) -> None:
        self._max_losses = max_losses
        # By each of its processes, until that has ended.
        self._lost_by_process: dict[str, _LostGroup] = {}

    def on_lost(self, slot: Slot, batch: Batch, loss: GroupLoss, now: float) -> list[tuple[Request, RequestError]]:
        """A group is lost while it ran a batch.

        Return those requests of the batch that end by that, each with its error.

        What becomes of a batch says something of a request only if that is all of it.
        """
        suspect = batch.single_request if loss.error_type is not None else None
        if suspect is not None:
            suspect.deaths += 1
            self._lost_by_process.update(dict.fromkeys(slot.all_processes, _LostGroup(suspect)))
        ended: list[tuple[Request, RequestError]] = []
        for request in dict.fromkeys(item.request for item in batch.awaited_items):
            # Those that have run parts of it at the same time may have been lost to the same thing.
            if batch.started_at >= request.lost_at:
                request.lost_slots += 1
                request.lost_at = now
            if loss.error_type is not None and request is suspect and request.deaths >= MAX_LOST_GROUPS:
                ended.append(
                    (request, loss.error_type(_error_text(request, request.deaths, "because of it", loss.reason)))
                )
            elif request.lost_slots >= self._max_losses:
                ended.append(
                    (
                        request,
                        Unavailable(_error_text(request, request.lost_slots, "while running it", loss.reason)),
                    )
                )
        return ended

    def on_exit(self, process: str, exit_cause: ExitCause) -> Request | None:
        """A process has ended; return the request against which its group is not held any more, if there is one."""
        lost_group = self._lost_by_process.pop(process, None)
        if (
            lost_group is None
            or lost_group.is_forgiven
            or not exit_cause.is_external
            or exit_cause.initiator is ExitInitiator.DAEMON
        ):
            return None
        lost_group.is_forgiven = True
        lost_group.request.deaths -= 1
        return lost_group.request


def _error_text(request: Request, count: int, loss_text: str, reason: str) -> str:
    return f"request {request.id}: {count} rank groups failed {loss_text}, the last one because {reason}"
