"""The list of steps holds everything that travels, each under a name of its own."""

import re
from pathlib import Path
from typing import get_args

import pytest

from tests.support.protocol_steps import STEPS, Channel, Party, Step
from triptych_common.protocol import store
from triptych_common.protocol.codec import BUS_MESSAGES
from triptych_common.protocol.messages import Decision, Message, Outcome
from triptych_common.protocol.names import StreamNames

PROTOCOL = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "protocol.md").read_text()
COMMANDS = set(get_args(get_args(store.StoreCommand)[0]))
REPLIES = set(get_args(get_args(store.StoreReply)[0]))
PUSHES = {store.EntrySealed, store.WriterLost}


def sent(*channels: Channel) -> set[type[Message] | None]:
    return {each.message for each in STEPS if each.channel in channels}


def test_every_message_on_the_streams_is_a_step() -> None:
    assert sent(Channel.STREAM) == set(BUS_MESSAGES)


def test_every_command_of_the_store_is_a_step() -> None:
    assert sent(Channel.STORE) == COMMANDS


def test_every_push_and_reply_of_the_store_belongs_to_a_step() -> None:
    assert sent(Channel.PUSH) == PUSHES
    assert {reply for each in STEPS for reply in each.replies} | PUSHES | {store.StoreFailure} == REPLIES


def test_decisions_and_outcomes_are_steps_of_their_own() -> None:
    variants = [
        each.variant for each in STEPS if each.variant is not None and each.sender is Party.PREFILL_DECODE
    ]
    assert sorted(variants) == sorted([*Decision, *Outcome])


@pytest.mark.parametrize("each", STEPS, ids=lambda each: each.name)
def test_a_step_names_its_stream(each: Step) -> None:
    assert (each.stream is not None) == (each.channel is Channel.STREAM)
    assert each.stream is None or hasattr(StreamNames, each.stream)


@pytest.mark.parametrize("each", STEPS, ids=lambda each: each.name)
def test_the_store_sends_pushes_and_receives_commands(each: Step) -> None:
    assert (each.receiver is Party.CACHE_STORE) == (each.channel is Channel.STORE)
    assert (each.sender is Party.CACHE_STORE) == (each.channel is Channel.PUSH)


def test_the_document_lists_exactly_the_steps() -> None:
    section = PROTOCOL.split("\n## Steps\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (\S+) → (\S+) \| (\S+) \|", section, re.MULTILINE)
    assert rows == [(each.name, each.sender, each.receiver, each.channel) for each in STEPS]
