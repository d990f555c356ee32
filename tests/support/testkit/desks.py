"""What the daemon's loop does with a desk, for tests that have no loop."""

from __future__ import annotations

from weightd_daemon.scheduling.dispatcher import Dispatcher
from weightd_daemon.scheduling.scheduler import AT_ONCE


def expire(desk: Dispatcher, now: float) -> None:
    """End every request whose deadline has passed. The desk ends only some of them in each turn of the loop."""
    desk.expire(now, lambda error: error)
    while desk.has_pending_failures or desk._scheduler.deadlines.next_deadline <= now:
        desk.expire(now, lambda error: error)


def run_turns(desk: Dispatcher, now: float) -> None:
    """Do what the desk has to do at once, as if no other message had come."""
    while desk.next_event_at == AT_ONCE:
        desk.expire(now, lambda error: error)
        desk._isolator.continue_fingerprint(now)
        desk.dispatch_gathered(now)
