"""LiteLLM's client of OpenAI's API."""

import asyncio
import json
import sys
from typing import Any

import litellm
import openai


def class_of_error(ask: Any) -> str:
    try:
        ask()
    except openai.APIError as error:  # LiteLLM's are OpenAI's
        return type(error).__name__
    return ""


def main(base_url: str, api_key: str, model: str, image_url: str) -> None:
    litellm.telemetry = False
    common: dict[str, Any] = {
        "model": f"openai/{model}", "api_base": base_url, "api_key": api_key, "num_retries": 0,
        "max_retries": 0, "temperature": 0, "max_tokens": 16,
    }  # fmt: skip

    def ask(content: Any, **options: Any) -> Any:
        return litellm.completion(messages=[{"role": "user", "content": content}], **(common | options))

    async def asynchronous() -> tuple[str, str]:
        messages = [{"role": "user", "content": "x"}]
        whole = await litellm.acompletion(messages=messages, **common)
        stream = await litellm.acompletion(messages=messages, stream=True, **common)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return whole.choices[0].message.content, "".join(pieces)

    chunks = list(ask("x", stream=True, stream_options={"include_usage": True}))
    picture = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": image_url}}]
    got = {
        "whole": ask("x").choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "tells_usage": any(getattr(chunk, "usage", None) for chunk in chunks),
        "asynchronous": asyncio.run(asynchronous()),
        "several": [ask("x").choices[0].message.content for _ in range(2)],
        "image": ask(picture).choices[0].message.content,
        "unknown_model": class_of_error(lambda: ask("x", model="openai/other")),
        "bad_field": class_of_error(lambda: ask("x", n=100_000)),
        "no_key": class_of_error(lambda: ask("x", api_key="none")),
    }
    print(json.dumps(got))


if __name__ == "__main__":
    main(*sys.argv[1:])
