"""Answers to requests on direct channels. No I/O."""

from __future__ import annotations

from typing import Any, Dict, Sequence, Tuple

from weightd_protocol import limits
from weightd_protocol.codec import clip, encode
from weightd_protocol.errors import RequestError
from weightd_protocol.framing import prefix_of
from weightd_protocol.messages.inference import Error, InferResponse, ResponseDescription

_MAX_FORMS = 64


class AnswerWriter:
    """Writes the packets of answers.

    Two answers with equal descriptions, whose ids have equal lengths, differ only in the id and the bytes of the
    outputs. So the writer keeps the bytes before and after the id.
    """

    def __init__(self) -> None:
        # By the id of the description's object and the length of the request's id: the description, to keep the object
        # alive; the bytes before and after the request's id; and the size of the packet. The oldest entries are dropped
        # first.
        self._forms: Dict[Tuple[int, int], Tuple[ResponseDescription, bytes, bytes, int]] = {}

    def result(self, request_id: str, description: ResponseDescription, tensors: Sequence[Any]) -> bytes:
        """Return the packet with the outputs of a model; b"" if it would be too large."""
        form = self._forms.get((id(description), len(request_id)))
        if form is None:
            form = self._learn_form(request_id, description, tensors)
        _, begin, end, nbytes = form
        return b"".join((begin, request_id.encode(), end, *tensors)) if nbytes <= limits.MAX_PACKET_BYTES else b""

    def _learn_form(
        self, request_id: str, description: ResponseDescription, tensors: Sequence[Any]
    ) -> Tuple[ResponseDescription, bytes, bytes, int]:
        frames = [*encode(InferResponse(request_id, description)), *tensors]
        prefix, nbytes = prefix_of((*map(len, frames),))
        # The id is the last field of the envelope.
        envelope_end = len(frames[0]) - len(request_id)
        form = description, prefix + frames[0][:envelope_end], frames[1], len(prefix) + nbytes
        if len(self._forms) >= _MAX_FORMS:
            del self._forms[next(iter(self._forms))]
        self._forms[id(description), len(request_id)] = form
        return form

    def error(self, request_id: str, code: str, text: str) -> bytes:
        """Return the packet with an error."""
        [envelope] = encode(Error(request_id, code, text))
        return prefix_of((len(envelope),))[0] + envelope

    def refusal(self, request_id: str, error: RequestError) -> bytes:
        """Return the packet with an error of this worker, which has not run the request."""
        return self.error(request_id, error.code, clip(str(error)))
