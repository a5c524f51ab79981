"""Request for a response: a chat with fields of its own."""

from dataclasses import dataclass, fields
from typing import Any

from triptych_common.domain.errors import RequestError
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.content_parts import MediaPart, Place, format_place, value_at
from triptych_gateway.request.forms.responses import check_beside_media

# Tools that callers run. Others would be run by prefill_decode, which would open connections for them.
CALLERS_TOOLS = ("function", "custom", "namespace")


@dataclass(frozen=True)
class ResponseRequest(ChatRequest):
    """Valid request. Images of the response that it continues come before its own, without a place."""

    response_id: str = ""  # id of the response that it makes

    @classmethod
    def of_chat(cls, chat: ChatRequest, response_id: str) -> "ResponseRequest":
        """Make the request from a chat. Raises RequestError: 400, a tool that callers do not run."""
        _check_tools(chat.body.get("tools"), ("tools",))
        values = {each.name: getattr(chat, each.name) for each in fields(chat)}
        values["body"] = {**chat.body, "request_id": response_id}
        return cls(**values, response_id=response_id)

    @property
    def stores(self) -> bool:
        """True if the response may be stored."""
        return bool(self.body.get("store", True))

    @property
    def is_background(self) -> bool:
        return bool(self.body.get("background"))

    @property
    def previous_response_id(self) -> str | None:
        previous: str | None = self.body.get("previous_response_id")
        return previous

    def is_kept(self, part: MediaPart) -> bool:
        """Return whether a continuation has the item too: vLLM leaves system messages out."""
        return not part.place or value_at(self.body, part.place[:2]).get("role") != "system"

    def check_beside_media(self, *, has_earlier_media: bool = False) -> None:
        """Refuse fields that cannot be combined with media, also with those from before.

        Raises:
            RequestError: 400.
        """
        if self.media or has_earlier_media:
            check_beside_media(self.body)


def _check_tools(tools: Any, place: Place) -> None:
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):  # else vLLM refuses them
        tool_place = (*place, index)
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in CALLERS_TOOLS:
            path = format_place((*tool_place, "type"))
            message = (
                f"{path}: tools of type {str(kind)[:50]!r} are not served; functions that callers run are"
            )
            raise RequestError(400, "unsupported_tool", message, path)
        if kind == "namespace":
            _check_tools(tool.get("tools"), (*tool_place, "tools"))
