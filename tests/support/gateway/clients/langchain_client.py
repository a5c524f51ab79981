"""LangChain's ChatOpenAI."""

import asyncio
import json
import sys
from typing import Any

import openai
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI


def class_of_error(chat: Any, content: Any) -> str:
    try:
        chat.invoke(content)
    except openai.APIStatusError as error:
        return next(
            each.__name__ for each in type(error).__mro__ if each.__module__.partition(".")[0] == "openai"
        )
    return ""


async def asynchronous(chat: Any) -> tuple[str, str]:
    whole = await chat.ainvoke("x")
    return whole.content, "".join([chunk.content async for chunk in chat.astream("x")])


def main(base_url: str, api_key: str, model: str, image_url: str) -> None:
    common: dict[str, Any] = {
        "base_url": base_url, "api_key": api_key, "max_retries": 0, "temperature": 0, "max_tokens": 16,
    }  # fmt: skip
    chat = ChatOpenAI(model=model, **common)
    picture = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": image_url}}]
    chunks = list(chat.stream("x", stream_usage=True))
    usage = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    got = {
        "whole": chat.invoke([SystemMessage("s"), HumanMessage("x")]).content,
        "streamed": "".join(chunk.content for chunk in chunks),
        "tells_usage": bool(usage),
        "asynchronous": asyncio.run(asynchronous(chat)),
        "several": [answer.content for answer in chat.batch(["x", "x"])],
        "image": chat.invoke([HumanMessage(content=picture)]).content,
        "unknown_model": class_of_error(ChatOpenAI(model="other", **common), "x"),
        "bad_field": class_of_error(ChatOpenAI(model=model, n=100_000, **common), "x"),
        "no_key": class_of_error(ChatOpenAI(model=model, **(common | {"api_key": "none"})), "x"),
    }
    print(json.dumps(got))


if __name__ == "__main__":
    main(*sys.argv[1:])
