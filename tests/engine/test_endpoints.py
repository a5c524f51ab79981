"""Every endpoint on real engines, body by body: the answer of vLLM's own server, but for ids and times.

The table of bodies is `tests.support.real.bodies`; each of them is asked once, when the first test needs it.
Then what clients make of it: OpenAI's, vLLM's own load generator, and others where they are installed.
"""

import asyncio
from types import ModuleType
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from tests.support.gateway.clients.running import PACKAGES, is_installed, run_client
from tests.support.real.bodies.asking import Reply, ask, ask_all
from tests.support.real.bodies.case import Case
from tests.support.real.bodies.comparing import alike
from tests.support.real.bodies.others import ALL
from tests.support.real.system import MODEL, Server, System, image_part
from triptych_gateway.endpoints.endpoint import BodyForm
from triptych_gateway.endpoints.table import COUNT_TOKENS, FORWARDED, MESSAGES, RESPONSES_PATH

pytestmark = pytest.mark.engine

# Compared in test_messages.py and test_responses.py.
ELSEWHERE = {MESSAGES.path, COUNT_TOKENS.path, RESPONSES_PATH}
NUM_PROMPTS = 4
GREEDY: dict[str, Any] = {"model": MODEL.name, "temperature": 0, "max_tokens": 16}

Replies = dict[str, dict[str, Reply]]


@pytest.fixture(scope="module")
def replies(system: System, monolith: Server) -> Replies:
    return ask_all({"triptych": system, "vllm": monolith}, ALL)


def test_the_table_has_every_endpoint_and_enough_bodies() -> None:
    assert len(ALL) >= 200
    here = {each.path for each in FORWARDED if each.form is BodyForm.JSON} - ELSEWHERE
    assert here <= {case.path for case in ALL.values()}
    assert sum(case.streams for case in ALL.values()) >= 60


@pytest.mark.parametrize("name", ALL)
def test_answers_equal_those_of_vllms_server(replies: Replies, name: str) -> None:
    case, got, wanted = ALL[name], replies["triptych"][name], replies["vllm"][name]
    shown = f"sent {case.sent}\ngot {got}\nwanted {wanted}"
    if case.own_status is not None:
        assert (got.status, wanted.status) == (case.own_status, 200), shown
        return
    assert (got.status, got.raised) == (wanted.status, wanted.raised), shown
    if wanted.status == 200:
        assert alike(got.content, wanted.content), shown
        return
    assert set(got.error) == {"message", "type", "param", "code"}, shown
    assert isinstance(got.error["code"], str), shown
    if not case.own_words:
        assert got.error["message"] == wanted.error["message"], shown


def test_most_bodies_are_answered(replies: Replies) -> None:
    """It would be no comparison if both refused them all."""
    answered = [name for name, reply in replies["vllm"].items() if reply.status == 200]
    assert len(answered) >= 150, len(answered)
    streamed = [name for name in answered if ALL[name].streams]
    assert all(replies["vllm"][name].content["choices"] for name in streamed)


def test_a_placeholders_token_ids_end_no_engine(system: System, monolith: Server) -> None:
    """The gateway knows placeholders as text alone; without media their ids are tokens like others."""
    with system.openai as ours, monolith.openai as theirs:
        asked = Case("/tokenize", {"prompt": "a <|image_pad|><|vision_start|> b"})
        tokens = ask(theirs, monolith, asked).content["tokens"]
        case = Case("/v1/completions", {"prompt": tokens, "temperature": 0, "max_tokens": 8})
        got, wanted = ask(ours, system, case), ask(theirs, monolith, case)
    assert wanted.status == 200
    assert alike(got.content, wanted.content), f"got {got}\nwanted {wanted}"
    assert system.ask("read the digits").token_ids == monolith.ask("read the digits").token_ids


# ---- clients ----------------------------------------------------------------------------------------
def picture(strips: ModuleType) -> dict[str, Any]:
    (strip,) = strips.held_out_strips(1, length=3, seed=31)
    return image_part(strip.png)


def messages(*content: Any) -> Any:
    return [{"role": "user", "content": [*content, {"type": "text", "text": "read the digits"}]}]


def test_openai_synchronous_and_streamed(system: System, monolith: Server, strips: ModuleType) -> None:
    asked, said = messages(picture(strips)), list[str]()
    for server in (system, monolith):
        with server.openai as client:
            whole = client.chat.completions.create(messages=asked, **GREEDY)
            stream = client.chat.completions.create(messages=asked, stream=True, **GREEDY)
            text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
            assert text == whole.choices[0].message.content
            said.append(text)
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(messages=asked, **(GREEDY | {"model": "other"}))
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(messages=asked, **(GREEDY | {"temperature": -1}))
    assert said[0] == said[1] != ""


async def test_openai_asynchronous(system: System, strips: ModuleType) -> None:
    async with AsyncOpenAI(
        base_url=system.base_url, api_key="none", http_client=DefaultAsyncHttpxClient(trust_env=False)
    ) as client:
        create = client.chat.completions.create
        whole, stream = await asyncio.gather(
            create(messages=messages(picture(strips)), **GREEDY),
            create(messages=messages(picture(strips)), stream=True, **GREEDY),
        )
        text = "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])
    assert text == whole.choices[0].message.content


@pytest.mark.filterwarnings("default")  # vLLM's own
async def test_vllms_bench_serve_with_random_media(system: System) -> None:
    """As a user calls it: text of random tokens and an image in each request."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    args = parser.parse_args(
        [
            "--backend=openai-chat", "--endpoint=/v1/chat/completions",
            f"--base-url={system.base_url.removesuffix('/v1')}", f"--model={MODEL.name}",
            f"--tokenizer={MODEL}", "--dataset-name=random-mm", f"--num-prompts={NUM_PROMPTS}",
            "--random-input-len=8", "--random-output-len=4", "--random-mm-base-items-per-request=1",
            "--random-mm-num-mm-items-range-ratio=0", "--ignore-eos", "--disable-tqdm", "--num-warmups=0",
            '--random-mm-limit-mm-per-prompt={"image": 1, "video": 0}',
            "--random-mm-bucket-config={(56, 56, 1): 1.0}",
        ]
    )  # fmt: skip
    figures = await serve.main_async(args)
    assert (figures["completed"], figures["failed"]) == (NUM_PROMPTS, 0)
    assert figures["total_output_tokens"] == 4 * NUM_PROMPTS


@pytest.mark.parametrize("script", PACKAGES)
def test_other_clients(system: System, strips: ModuleType, script: str) -> None:
    if not is_installed(script):
        pytest.skip(f"{PACKAGES[script][1]} is not installed: test_sdk_others.py installs it")
    url = picture(strips)["image_url"]["url"]
    got = run_client(script, None, system.base_url, "none", MODEL.name, url)
    assert got["whole"]
    assert got["image"]
    assert got["streamed"] == got["asynchronous"][1] == got["several"][0]
    assert (got["tells_usage"], got["unknown_model"]) == (True, "NotFoundError")
