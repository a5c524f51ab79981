"""A client of the system: it asks, and sorts the answers it gets by kind.

Every answer is one of: right, a documented error, gone (the gateway itself went away), or wrong.
"""

import asyncio
import base64
import functools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson

from tests.support.fast.processes.tensors import DEFAULT_TOKENS, DIGEST, MODEL, answer_words, word_of_media

RUNBOOK = Path(__file__).resolve().parents[3] / "docs" / "operations" / "runbook.md"
RETRYABLE = (429, 503, 504)  # what a caller may get while something is broken


@functools.cache
def documented_codes() -> dict[int, frozenset[str]]:
    """By status, what the runbook lists for a fault that is not the caller's."""
    text = RUNBOOK.read_text()
    found: dict[int, frozenset[str]] = {}
    for title, rows in re.findall(r"^### ([0-9, ]+):[^\n]*\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL):
        codes = frozenset(re.findall(r"^\| `([a-z_]+)` \|", rows, re.MULTILINE))
        found |= {int(status): codes - {"internal_error"} for status in title.split(",")}
    assert all(found.get(status) for status in RETRYABLE), found
    return {status: found[status] for status in RETRYABLE}


@dataclass(frozen=True)
class Question:
    """One user message: text, and images before it. A subclass may be about another model.

    `earlier`: of a conversation the texts before, the user's and the answers in turn; the images came with
    the first one.
    """

    text: str
    images: tuple[bytes, ...] = ()
    num_tokens: int = DEFAULT_TOKENS
    stream: bool = True
    earlier: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The right answer."""
        return self.words_of(DIGEST)

    def words_of(self, namespace: str) -> list[str]:
        """The right answer of an instance of `namespace`."""
        items = [word_of_media(image, namespace) for image in self.images]
        return answer_words(items, "\n".join((*self.earlier, self.text)), self.num_tokens, namespace)

    def body(self) -> dict[str, Any]:
        parts: list[dict[str, Any]] = [
            {
                "type": "image_url",
                "image_url": {"url": f"data:image/png;base64,{base64.b64encode(image).decode()}"},
            }
            for image in self.images
        ]
        first, *others = (*self.earlier, self.text)
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": [*parts, {"type": "text", "text": first}]}
        ]
        for number, text in enumerate(others):
            messages.append({"role": "user" if number % 2 else "assistant", "content": text})
        return {
            "model": MODEL,
            "messages": messages,
            "max_tokens": self.num_tokens,
            "stream": self.stream,
        }

    def words_in(self, choice: dict[str, Any]) -> list[str]:
        """Of a choice of the answer, or of an event of it: what is compared with `words`."""
        content: str = (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        return content.split()


@dataclass
class Answer:
    """What came back."""

    question: Question
    status: int | None = None  # None: no HTTP answer
    code: str = ""  # of an error
    message: str = ""  # likewise
    words: list[str] = field(default_factory=list)
    is_complete: bool = False
    fault: str = ""  # what broke off at the client
    has_hung: bool = False  # nothing came to an end within the client's limit
    asked_at: float = 0.0  # monotonic seconds
    elapsed_s: float = 0.0
    first_token_at: float | None = None  # monotonic seconds
    request_id: str = ""  # the gateway's
    retry_after_s: float | None = None  # as it says

    @property
    def has_begun(self) -> bool:
        """At least one token arrived."""
        return bool(self.words)

    @property
    def is_right(self) -> bool:
        return self.status == 200 and self.is_complete and self.words == self.question.words

    def is_right_of(self, namespaces: Sequence[str]) -> bool:
        """Right for one of `namespaces`, in all of its words."""
        is_whole = self.status == 200 and self.is_complete
        return is_whole and any(self.words == self.question.words_of(each) for each in namespaces)

    @property
    def is_wrong(self) -> bool:
        """Words that are not the right ones, or an end without the rest and without an error."""
        if not self.words and not self.is_complete:
            return False
        if self.words != self.question.words[: len(self.words)]:
            return True
        return self.is_complete and not self.code and self.status == 200 and not self.is_right

    @property
    def is_documented_error(self) -> bool:
        status = 503 if self.status == 200 else self.status  # in a stream: an event
        return self.code in documented_codes().get(status or 0, frozenset())

    @property
    def is_gone(self) -> bool:
        """The gateway went away, and could send no error."""
        return bool(self.fault) and not self.code and not self.has_hung

    def __str__(self) -> str:
        kind = "right" if self.is_right else "WRONG" if self.is_wrong else self.code or self.fault or "?"
        return f"{kind} (status {self.status}, {len(self.words)} words, {self.elapsed_s:.2f} s)"

    def whole(self, since: float = 0.0) -> str:
        """All that is known of it, for the report of a failure; times in seconds after `since`."""
        question, end = self.question, self.asked_at + self.elapsed_s
        first = "never" if self.first_token_at is None else f"{self.first_token_at - since:.3f}"
        kind = "stream" if question.stream else "whole"
        try:
            expected = " ".join(question.words)
        except OSError:
            expected = "no words: an image that cannot be decoded"
        lines = {
            "asked": f"{len(question.images)} images, {question.num_tokens} tokens, {kind}",
            "when": f"asked {self.asked_at - since:.3f}, first token {first}, end {end - since:.3f}",
            "came": f"status {self.status}, code {self.code!r}, message {self.message!r}",
            "complete": f"{self.is_complete}, fault {self.fault!r}",
            "words": " ".join(self.words),
            "expected": expected,
        }
        return "\n".join([f"{question.text!r}: {self}", *(f"    {key:10}{lines[key]}" for key in lines)])


class HungError(TimeoutError):
    """Nothing came to an end within the client's limit."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"{answer.question.text!r}: {answer.fault}")
        self.answer = answer


class Client:
    """For one event loop."""

    def __init__(self, base_url: str, limit_s: float) -> None:
        self._http = httpx.AsyncClient(
            base_url=base_url,
            timeout=httpx.Timeout(limit_s, connect=5.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )
        self._limit_s = limit_s

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def ask(self, question: Question, leave_after_s: float | None = None) -> Answer:
        """The answer. Never raises for what the system does.

        Args:
            leave_after_s: close the connection then; the answer has it in `fault`.

        Raises:
            HungError: nothing came to an end within the client's limit.
        """
        answer = Answer(question, asked_at=time.monotonic())
        try:
            async with asyncio.timeout(self._limit_s):
                await self._leaving(answer, leave_after_s)
        except httpx.HTTPError as error:
            answer.fault = f"{type(error).__name__}: {error}"
        except TimeoutError:
            answer.fault, answer.has_hung = f"no end within {self._limit_s} s", True
        answer.elapsed_s = time.monotonic() - answer.asked_at
        if answer.has_hung:
            raise HungError(answer)
        return answer

    async def _leaving(self, answer: Answer, leave_after_s: float | None) -> None:
        if leave_after_s is None:
            await self._exchange(answer)
            return
        task = asyncio.get_running_loop().create_task(self._exchange(answer))
        done, _ = await asyncio.wait({task}, timeout=leave_after_s)
        if done:
            task.result()
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        answer.fault = "left"

    async def _exchange(self, answer: Answer) -> None:
        body = orjson.dumps(answer.question.body())
        async with self._http.stream(
            "POST", "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
        ) as response:
            answer.status = response.status_code
            answer.request_id = response.headers.get("X-Request-Id", "")
            if (retry_after := response.headers.get("Retry-After")) is not None:
                answer.retry_after_s = float(retry_after)
            if response.status_code != 200 or not answer.question.stream:
                _read_whole(answer, await response.aread())
                return
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    _read_event(answer, line.removeprefix("data: "))
            if not answer.is_complete and not answer.code:
                answer.fault = "the stream ended without [DONE] and without an error"


def _read_whole(answer: Answer, raw: bytes) -> None:
    parsed = orjson.loads(raw)
    if "error" in parsed:
        answer.code, answer.message = str(parsed["error"]["code"]), str(parsed["error"].get("message"))
        return
    answer.words = answer.question.words_in(parsed["choices"][0])
    answer.is_complete = True


def _read_event(answer: Answer, data: str) -> None:
    if data == "[DONE]":
        answer.is_complete = True
        return
    parsed = orjson.loads(data)
    if "error" in parsed:
        answer.code, answer.message = str(parsed["error"]["code"]), str(parsed["error"].get("message"))
        return
    if answer.first_token_at is None:
        answer.first_token_at = time.monotonic()
    for choice in parsed["choices"]:
        answer.words += answer.question.words_in(choice)


async def ask_all(client: Client, questions: Sequence[Question]) -> list[Answer]:
    """At the same time."""
    return list(await asyncio.gather(*(client.ask(question) for question in questions)))
