"""The tenant of a request that comes back from a direct channel."""

from __future__ import annotations

from weightd_daemon.api.channels import with_tenant
from weightd_protocol.codec import decode, encode
from weightd_protocol.framing import Message
from weightd_protocol.messages.channels import FROM_CHANNEL
from weightd_protocol.messages.control import ServerReady
from weightd_protocol.messages.inference import Infer, Parameters, RequestDescription, TensorSpec

DESCRIPTION = RequestDescription("m", (TensorSpec("x", "UINT8", (3,)),))


def message_of(*frames: bytes) -> Message:
    return Message(frames, tuple(map(len, frames)))


def test_request_gets_the_tenant_of_its_channel() -> None:
    infer = Infer("1", DESCRIPTION, Parameters(timeout_us=5, tenant="another"))
    found = with_tenant(message_of(*encode(infer), b"abc"), "t")
    assert decode(found.frames, FROM_CHANNEL) == Infer("1", DESCRIPTION, Parameters(timeout_us=5, tenant="t"))
    assert (found.frames[2], found.lengths) == (b"abc", tuple(map(len, found.frames)))


def test_message_that_is_no_request_stays() -> None:
    message = message_of(*encode(ServerReady("1")))
    assert with_tenant(message, "t") is message
