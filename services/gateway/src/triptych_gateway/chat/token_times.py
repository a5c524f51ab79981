"""Times at which the tokens of one answer pass, for the metrics."""

import time

from triptych_gateway.chat.sse import num_roles_in, num_tokens_in
from triptych_gateway.endpoints.endpoint import ChatForm
from triptych_gateway.metrics import LatencySeries


class TokenTimes:
    """Token times of one answer. Its cost per chunk must be negligible beside the chunk's relay."""

    __slots__ = ("_arrived_at", "_first_at", "_form", "_inter_token_s", "_last_at", "_series", "num_tokens")

    def __init__(
        self, series: LatencySeries, arrived_at: float, form: ChatForm = ChatForm.COMPLETIONS
    ) -> None:
        """Store the series; `arrived_at` is the request's arrival in monotonic seconds."""
        self._series = series
        self._form = form
        self._inter_token_s = series.inter_token_s
        self._arrived_at = arrived_at
        self._first_at = 0.0  # 0: no token yet
        self._last_at = 0.0
        self.num_tokens = 0

    def on_events(self, events: bytes) -> None:
        """Record whole events of a stream. Several tokens at once have no gap between them."""
        num_tokens = num_tokens_in(events, self._form)
        if not self.num_tokens and self._form is ChatForm.COMPLETIONS:
            num_tokens -= num_roles_in(events)
        if num_tokens <= 0:
            return
        now = time.monotonic()
        if self.num_tokens:
            self._inter_token_s.observe(now - self._last_at)
        else:
            self._first_at = now
            self._series.first_token_s.observe(now - self._arrived_at)
        for _ in range(num_tokens - 1):
            self._inter_token_s.observe(0.0)
        self._last_at = now
        self.num_tokens += num_tokens

    def on_end(self) -> None:
        """Record the end of a good answer."""
        if self.num_tokens > 1:
            seconds = self._last_at - self._first_at
            self._series.per_output_token_s.observe(seconds / (self.num_tokens - 1))
        self._series.e2e_s.observe(time.monotonic() - self._arrived_at)
