"""The loss of rank groups, and how a loss counts against the request that the group ran.

The cause of a loss is seldom known at once: if one rank is killed or paused from outside, the other ranks fail or hang,
and the daemon may notice them first. So the first loss only counts against the request that the group ran, whatever the
reason for the loss; the second loss ends the request. A loss is forgiven if a process of the group turns out to have
been ended from outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator
from weightd_daemon.scheduling.batch import Batch
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.slots import Slot
from weightd_protocol.errors import RequestError, Unavailable

# A request is considered the cause once this number of rank groups were lost while they ran the request.
MAX_LOST_GROUPS = 2


class GroupLoss(NamedTuple):
    """Why a rank group was lost, and the type of the error for the request that caused the loss; None if none did."""

    reason: str
    error_type: type[RequestError] | None


@dataclass(eq=False, slots=True)
class _LostGroup:
    """A rank group that was lost while it ran a request, and of which some processes have not exited yet."""

    request: Request
    is_forgiven: bool = False


class RankGroupFailures:
    """The lost rank groups of one model.

    Args:
        max_losses: a request ends once this number of groups were lost while they ran the request, whatever the
            reasons.
    """

    def __init__(self, max_losses: int) -> None:
        self._max_losses = max_losses
        # The lost group of each process that has not exited yet.
        self._lost_by_process: dict[str, _LostGroup] = {}

    def on_lost(self, slot: Slot, batch: Batch, loss: GroupLoss, now: float) -> list[tuple[Request, RequestError]]:
        """Record that a rank group is lost while it ran a batch.

        A loss counts as a death of a request only if the batch consists of that request alone.

        Returns:
            The requests of the batch that end, each with its error.
        """
        suspect = batch.single_request if loss.error_type is not None else None
        if suspect is not None:
            suspect.deaths += 1
            self._lost_by_process.update(dict.fromkeys(slot.all_processes, _LostGroup(suspect)))
        ended: list[tuple[Request, RequestError]] = []
        for request in dict.fromkeys(item.request for item in batch.awaited_items):
            # Groups that ran parts of the request at the same time may have been lost for the same reason, so they
            # count once.
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
        """Handle the exit of a process.

        Returns:
            The request against which the loss of the process's group no longer counts, because the process was ended
            from outside; otherwise None.
        """
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
