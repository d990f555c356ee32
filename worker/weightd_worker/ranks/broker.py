"""The life of a broker: by it the ranks of a group find each other, and it ends with them."""

from __future__ import annotations

import logging
import os
from typing import Callable, Union

from weightd_protocol import limits
from weightd_protocol.codec import Decoder, encode, type_name
from weightd_protocol.errors import RemoteProtocolError, WeightdError
from weightd_protocol.messages.ranks import JoinGroup
from weightd_protocol.messages.worker import TO_CHILD, Hello, Ping, Pong, Reconnected, Stop
from weightd_worker import exit_codes
from weightd_worker.channel import ChannelConnection
from weightd_worker.connection import WorkerConnection
from weightd_worker.engines.errors import EngineMissing
from weightd_worker.engines.sharing import NotShared
from weightd_worker.session_base import all_versions

_log = logging.getLogger("weightd.worker")

NO_MODEL_DIGEST = "none"
"""What a broker says in the place of a digest."""

RANK_LOST = 1
"""The exit status of one whose ranks have not come, or were lost."""


def run(connection: Union[WorkerConnection, ChannelConnection], serve: Callable[[], None]) -> int:
    """Say HELLO, and let ranks find each other once it is told to; return the exit status.

    While it does, it hears nothing: the library has this thread, and MindSpore's the interpreter's lock with it, so
    that no other thread runs either. It ends when the ranks have left, and otherwise by a signal.

    Args:
        connection: to the daemon.
        serve: serves the ranks until they have left.
    """
    connection.send(encode(Hello(str(os.getpid()), NO_MODEL_DIGEST, all_versions({}), NotShared.traits)))
    decoder = Decoder(TO_CHILD, max_bytes=limits.MAX_CHILD_HEADER_BYTES)
    while True:
        messages = connection.receive()
        if messages is None:
            connection.send(encode(Reconnected()))
            continue
        for frames in messages:
            order = decoder.decode(frames)
            if isinstance(order, Stop):
                return exit_codes.OK
            if isinstance(order, Ping):
                connection.send(encode(Pong()))
            elif isinstance(order, JoinGroup):
                return _serve(serve)
            else:
                raise RemoteProtocolError(f"type: expected join_group, ping or stop, got {type_name(order)}")


def _serve(serve: Callable[[], None]) -> int:
    """As a broker of the library alone it ends with 1 where a rank was lost; why, its log has as the last words."""
    try:
        serve()
    except EngineMissing as error:
        _log.error("%s", error)
        return exit_codes.NO_ENGINE
    except WeightdError as error:
        _log.error("%s", error)
        return RANK_LOST
    return exit_codes.OK
