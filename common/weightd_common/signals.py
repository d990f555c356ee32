"""The signal state that every program of weightd starts with, whatever its parent had ignored or blocked."""

from __future__ import annotations

import signal

# Shells and nohup(1) ignore these on purpose for the programs that they start in the background.
_INHERITED = frozenset(
    (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
)

# Python itself ignores these in every process.
_IGNORED_BY_PYTHON = frozenset((signal.SIGPIPE, signal.SIGXFSZ))


def reset(*ignored: signal.Signals) -> None:
    """Set ignored signals back to their default action, and block none. Call it first, in the main thread.

    A parent that ignores SIGCHLD would otherwise have the kernel discard the exit statuses of this process's children,
    and one that blocks SIGTERM would make this process deaf to it. SIGHUP, SIGINT, SIGQUIT and the signals of job
    control stay ignored if they are: nohup(1) and shells ask for that.

    Args:
        ignored: this process ignores these signals from now on, including those that are pending.
    """
    # Before they are unblocked: ignoring a signal discards it where it is pending.
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    kept = {*ignored, *_INHERITED, *_IGNORED_BY_PYTHON}
    for each in range(1, signal.NSIG):
        if each not in kept and signal.getsignal(each) is signal.SIG_IGN:
            signal.signal(each, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
