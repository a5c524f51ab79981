"""Proxy of vLLM's own encoder disaggregation at its best: encode first, then prefill.

    python -m comparison.serial_proxy --port 9000 --encoder URL --prefill-decode URL

It follows the proxy of vLLM's examples (`examples/disaggregated/disaggregated_encoder`): each image of a
request goes to the encoder, all at once, named by the hash of its content; when the encoder has answered all
of them, prefill_decode gets the request with metadata instead of the images, so that nothing is preprocessed
twice. Unlike that example it has one event loop, one pool of connections, no log, and no web framework.
"""

import argparse
import asyncio
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

MAX_BODY_BYTES = 256 << 20
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Upstreams:
    encoders: tuple[str, ...]
    prefill_decode: str
    session: aiohttp.ClientSession


UPSTREAMS = web.AppKey("upstreams", Upstreams)


class EncodeFailedError(Exception):
    """The encoder refused an image, or gave no metadata for it."""


async def chat(request: web.Request) -> web.StreamResponse:
    """Serve `/v1/chat/completions`; the answer's `x-encode-ms` is the encoder's time for all images."""
    upstreams = request.app[UPSTREAMS]
    raw = await request.read()
    body = json.loads(raw)
    start = time.monotonic()
    try:
        if await _encode_all(body, upstreams):
            raw = json.dumps(body).encode()
    except EncodeFailedError as error:
        return web.json_response({"error": {"message": str(error)}}, status=502)
    encode_ms = (time.monotonic() - start) * 1e3
    async with upstreams.session.post(
        f"{upstreams.prefill_decode}/chat/completions",
        data=raw,
        headers={"Content-Type": "application/json"},
    ) as answer:
        relayed = web.StreamResponse(
            status=answer.status,
            headers={"Content-Type": answer.content_type, "x-encode-ms": f"{encode_ms:.3f}"},
        )
        await relayed.prepare(request)
        async for chunk in answer.content.iter_any():
            await relayed.write(chunk)
        await relayed.write_eof()
        return relayed


async def _encode_all(body: Mapping[str, Any], upstreams: Upstreams) -> bool:
    """Replace the images of `body` by their metadata, in place; False if there are none."""
    places = [
        (message["content"], number)
        for message in body["messages"]
        if isinstance(message["content"], list)
        for number, part in enumerate(message["content"])
        if part.get("type") == "image_url"
    ]
    encoders = upstreams.encoders
    parts = await asyncio.gather(
        *(
            _encode(content[number], body["model"], encoders[place % len(encoders)], upstreams.session)
            for place, (content, number) in enumerate(places)
        )
    )
    for (content, number), part in zip(places, parts, strict=True):
        content[number] = part
    return bool(places)


async def _encode(
    part: Mapping[str, Any], model: str, encoder: str, session: aiohttp.ClientSession
) -> dict[str, Any]:
    """Get one image encoded; returns the part that stands for it.

    Raises:
        EncodeFailedError: it was not.
    """
    mm_hash = hashlib.sha256(part["image_url"]["url"].encode()).hexdigest()
    request = {
        "model": model,
        "messages": [{"role": "user", "content": [{**part, "uuid": mm_hash}]}],
        "max_tokens": 1,
    }
    async with session.post(f"{encoder}/chat/completions", json=request) as answer:
        text = await answer.text()
        if answer.status != 200:
            raise EncodeFailedError(f"the encoder answered {answer.status}: {text[:300]}")
    return reference_part(json.loads(text), mm_hash)


def reference_part(answer: Mapping[str, Any], mm_hash: str) -> dict[str, Any]:
    """Part that stands for an image at prefill_decode, from the encoder's answer about it.

    Raises:
        EncodeFailedError: it holds no metadata.
    """
    item = (answer.get("ec_transfer_params") or {}).get(mm_hash) or {}
    metadata = item.get("metadata") or {}
    if not metadata:
        raise EncodeFailedError(f"no metadata of the image: {json.dumps(answer)[:300]}")
    flat = {
        key: [number for row in value for number in (row if isinstance(row, list) else [row])]
        for key, value in metadata.items()
    }
    return {"type": "image_embeds", "image_embeds": flat, "uuid": mm_hash}


async def health(request: web.Request) -> web.Response:
    """Answer as soon as it listens: the engines are up before it is started."""
    return web.Response(text="ok")


def new_app(encoders: tuple[str, ...], prefill_decode: str) -> web.Application:
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/health", health)

    async def sessions(app: web.Application) -> Any:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=timeout, read_bufsize=1 << 20
        ) as session:
            app[UPSTREAMS] = Upstreams(encoders, prefill_decode, session)
            yield

    app.cleanup_ctx.append(sessions)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--encoder", action="append", required=True, help="base URL, up to /v1; repeatable")
    parser.add_argument("--prefill-decode", required=True, help="base URL, up to /v1")
    options = parser.parse_args()
    app = new_app(tuple(options.encoder), options.prefill_decode)
    web.run_app(app, host="127.0.0.1", port=options.port, access_log=None, print=None)


if __name__ == "__main__":
    main()
