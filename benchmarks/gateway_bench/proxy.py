"""A minimal proxy on aiohttp: `python -m gateway_bench.proxy PORT UPSTREAM_URL`.

It reads the body, sends it on, and passes each chunk of the answer through. No keys, no bounds, no
validation, no choice, no traces, no metrics, nothing that ends a request when one side goes away.
"""

import asyncio
import sys
from collections.abc import AsyncIterator

import uvloop
from aiohttp import ClientSession, TCPConnector, web

CHAT_PATH = "/v1/chat/completions"


def new_app(upstream_url: str) -> web.Application:
    app = web.Application()
    session = web.AppKey("session", ClientSession)

    async def own_session(app: web.Application) -> AsyncIterator[None]:
        async with ClientSession(connector=TCPConnector(limit=0), auto_decompress=False) as opened:
            app[session] = opened
            yield

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"Content-Type": "application/json"}
        async with request.app[session].post(upstream_url + CHAT_PATH, data=body, headers=headers) as answer:
            content_type = answer.headers["Content-Type"]
            if answer.content_length is not None:
                whole = await answer.read()
                return web.Response(body=whole, status=answer.status, headers={"Content-Type": content_type})
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    app.cleanup_ctx.append(own_session)
    app.router.add_post(CHAT_PATH, chat)
    return app


async def main(port: int, upstream_url: str) -> None:
    runner = web.AppRunner(new_app(upstream_url), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2]))
