"""Exit statuses of weightctl, taken from sysexits.h where possible."""

from __future__ import annotations

from typing import Mapping

from weightd_common import commandline

OK = 0
ERROR = 1  # a request failed, or a model that `status` shows has failed
USAGE = commandline.EXIT_USAGE
NO_INPUT = 66  # EX_NOINPUT: an input file is missing or invalid
UNAVAILABLE = 69  # EX_UNAVAILABLE: the daemon cannot be reached, or does not respond
CANNOT_WRITE = 74  # EX_IOERR: the output cannot be written
NOT_YET = 75  # EX_TEMPFAIL: a model does not serve yet (`status`), is not ready (`health`) or still loads (`update`)
PROTOCOL = 76  # EX_PROTOCOL: the daemon speaks another version of the protocol
NO_PERMISSION = 77  # EX_NOPERM: this user may not connect to the daemon, or lacks the right to the operation
INTERRUPTED = 130  # Ctrl-C: the status with which a shell reports SIGINT
BROKEN_PIPE = 141  # the reader of the output has exited: the status with which a shell reports SIGPIPE

HELP = """\
Exit status: 0 good, 1 the request or a model failed, 64 wrong command line, 66 invalid input file,
69 the daemon cannot be reached, 74 the output cannot be written, 75 a model does not serve yet,
76 the daemon uses another protocol version, 77 permission denied, 130 Ctrl-C."""

# The exit statuses as the manual page explains them to users.
MEANINGS: Mapping[int, str] = {
    OK: "Success; see the command.",
    ERROR: "The request failed; `status`: a model has failed; `bench`: the model did not answer; "
    "`install-units`: a file was kept.",
    USAGE: "The command line is invalid.",
    NO_INPUT: "An input file is missing or invalid.",
    UNAVAILABLE: "The daemon cannot be reached, or does not respond; `install-units`: weightd is not installed; "
    "`keygen`: libzmq was built without CURVE.",
    CANNOT_WRITE: "The output cannot be written.",
    NOT_YET: "A model does not serve yet, but has not failed; `health`: it is not ready; `update`: it is loading.",
    PROTOCOL: "The daemon uses another version of the protocol.",
    NO_PERMISSION: "Permission denied: this user may not connect, or may not write the files.",
    INTERRUPTED: "Interrupted by Ctrl-C.",
    BROKEN_PIPE: "The reader of the output has exited.",
}
