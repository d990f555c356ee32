"""Decides when a client asks the daemon for a direct channel. No I/O.

A client asks for a channel to a model after the daemon has answered a few of its requests to the model, and again after
a pause if the daemon has refused or ended the channel. It sends the message together with its next request.
"""

from __future__ import annotations

import math
import threading
from typing import Callable, Dict, List, Optional

from weightd_protocol import limits
from weightd_protocol.messages.channels import ChannelOpened, OpenChannel

MAX_OPEN_CHANNELS = 64
"""Maximum number of channels of one client. The daemon allows a user no more of them on one device."""

# A channel expires at most this number of seconds after the daemon has granted it.
_MAX_LIFETIME_S = 60.0

# The client asks after this number of answers, and not sooner than this number of seconds after a refusal or an end.
_MIN_ANSWERS = 3
_MIN_PAUSE_S = 5.0

# Maximum number of models whose answers are counted.
_MAX_COUNTED_MODELS = limits.MAX_MODELS


class _ModelUse:
    """The use of one model over the present connection.

    Attributes:
        answers: the number of answers of the daemon, up to `_MIN_ANSWERS`.
        ask_at: the time from which the client may ask for a channel.
        has_channel: whether the client has a channel, or has asked for one and has no response.
    """

    __slots__ = ("answers", "ask_at", "has_channel")

    def __init__(self) -> None:
        self.answers = 0
        self.ask_at = -math.inf
        self.has_channel = False


class ChannelRequests:
    """The requests of one client for direct channels.

    One thread may process responses while another one sends requests.

    Args:
        next_id: returns a new id for a message.
        tenant: the tenant on whose behalf the client sends requests; None for its own.
        clock: returns the time of CLOCK_MONOTONIC in seconds.

    Attributes:
        tenant: as above.
        ask_at: the time at which `take_messages` has messages to send; infinite if it has none.
        has_responses: whether the daemon has granted or refused a channel since `take_opened` was called.
    """

    def __init__(self, next_id: Callable[[], str], tenant: Optional[str], clock: Callable[[], float]) -> None:
        self.ask_at = math.inf
        self.has_responses = False
        self._next_id = next_id
        self.tenant = tenant
        self._clock = clock
        self._lock = threading.RLock()
        self._can_ask = False
        self._models: Dict[str, _ModelUse] = {}
        # The models for which the client wants to ask, and the models of the messages without a response, by their ids.
        self._wanted: List[str] = []
        self._unanswered: Dict[str, str] = {}
        self._opened: List[ChannelOpened] = []

    @property
    def is_pending(self) -> bool:
        """Whether the daemon may send the client's end of a channel."""
        return bool(self._unanswered)

    def reset(self, *, can_ask: bool) -> None:
        """Begin again, because the connection is lost, or is a new one, on which the client may ask or not."""
        with self._lock:
            self._can_ask = can_ask
            self._models.clear()
            self._wanted.clear()
            self._unanswered.clear()
            self._opened.clear()
            self.ask_at = math.inf

    def on_answer(self, model: str) -> None:
        """The daemon has answered a request to a model that has no channel."""
        use = self._models.get(model)
        if use is None:
            use = self._count_model(model)
        if use.answers < _MIN_ANSWERS:
            use.answers += 1
            if use.answers == _MIN_ANSWERS and not use.has_channel and self._can_ask:
                with self._lock:
                    self._wanted.append(model)
                    self._update()

    def take_messages(self) -> List[OpenChannel]:
        """Return the messages that the caller has to send now."""
        now = self._clock()
        messages: List[OpenChannel] = []
        with self._lock:
            for model in list(self._wanted):
                use = self._models[model]
                if use.ask_at <= now and self._has_room():
                    self._wanted.remove(model)
                    use.has_channel = True
                    message = OpenChannel(self._next_id(), model, self.tenant)
                    self._unanswered[message.id] = model
                    messages.append(message)
            self._update()
        return messages

    def on_opened(self, message: ChannelOpened) -> None:
        """Store the response about a new channel."""
        self._opened.append(message)
        self.has_responses = True

    def take_opened(self) -> List[ChannelOpened]:
        """Return the responses about new channels. For each of them, call `take_model` or `on_refused`."""
        opened, self._opened = self._opened, []
        self.has_responses = False
        return opened

    def take_model(self, request_id: str) -> Optional[str]:
        """Return the model of a message that has its response; None if the client has not sent it."""
        return self._unanswered.pop(request_id, None)

    def is_plausible(self, message: ChannelOpened) -> bool:
        """Return whether a new channel expires soon.

        If not, the client and the daemon have different clocks: the client runs in a time namespace. Its deadlines mean
        other times to the workers then, so it must not use the channel.
        """
        return 0 <= message.expires_us / 1e6 - self._clock() <= _MAX_LIFETIME_S

    def on_refused(self, request_id: str) -> bool:
        """Return whether the failed message was a request for a channel."""
        model = self.take_model(request_id)
        if model is not None:
            self.has_responses = True
            self.on_end(model)
        return model is not None

    def on_end(self, model: str) -> None:
        """The daemon has refused or ended a channel. Ask again after a pause, and not before another answer."""
        with self._lock:
            use = self._models.get(model)
            if use is not None:
                use.has_channel = False
                use.answers = _MIN_ANSWERS - 1
                use.ask_at = self._clock() + _MIN_PAUSE_S
            self._update()

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _count_model(self, model: str) -> _ModelUse:
        with self._lock:
            if len(self._models) >= _MAX_COUNTED_MODELS:
                self._models = {
                    name: use for name, use in self._models.items() if use.has_channel or name in self._wanted
                }
            use = self._models[model] = _ModelUse()
        return use

    def _has_room(self) -> bool:
        return sum(use.has_channel for use in self._models.values()) < MAX_OPEN_CHANNELS

    def _update(self) -> None:
        times = [self._models[model].ask_at for model in self._wanted] if self._wanted and self._has_room() else []
        self.ask_at = min(times, default=math.inf)
