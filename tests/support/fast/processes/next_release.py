"""A service of the next release: another version, and one more field in each message at every depth."""

from typing import Any
from unittest import mock

import orjson

import triptych_common
from triptych_common.protocol.messages import Message

VERSION = "0.999.0"
ADDED = "added_in_the_next_release"


def install() -> None:
    """Make this process, before its service starts, one of the next release."""
    mock.patch.object(triptych_common, "version", return_value=VERSION).start()
    dump = Message.model_dump

    def model_dump(self: Message, **options: Any) -> Any:
        shown = dump(self, **options)
        return shown if "include" in options else _extended(self, shown)  # of log lines: fields of a message

    def model_dump_json(self: Message, **options: Any) -> str:
        return orjson.dumps(model_dump(self, mode="json", **options)).decode()

    mock.patch.multiple(Message, model_dump=model_dump, model_dump_json=model_dump_json).start()


def _extended(value: Any, shown: Any) -> Any:
    """`shown`, the dump of `value`, with the field in each message."""
    if isinstance(value, Message):
        fields = {name: _extended(getattr(value, name), each) for name, each in shown.items()}
        return {**fields, ADDED: {"of": value.TYPE}}
    if isinstance(value, tuple):
        return [_extended(*pair) for pair in zip(value, shown, strict=True)]
    return shown
