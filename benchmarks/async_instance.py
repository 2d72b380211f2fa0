"""Serves as the instance of async_inference.py: reads a body of any length and answers with a fixed number of bytes.

python -m benchmarks.async_instance NUM_BYTES      prints its port

A body of less than 1,000 bytes gets an answer of the same length.
"""

import asyncio
import sys

from aiohttp import web

PIECE = bytes(1 << 20)


async def main() -> None:
    num_bytes = int(sys.argv[1])

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        num_read = 0
        async for piece in request.content.iter_any():
            num_read += len(piece)
        reply = web.StreamResponse(headers={"Content-Type": "application/x-bytes"})
        reply.content_length = num_left = num_read if num_read < 1000 else num_bytes
        await reply.prepare(request)
        while num_left:
            await reply.write(PIECE[:num_left])
            num_left -= len(PIECE[:num_left])
        return reply

    server = await asyncio.get_running_loop().create_server(web.Server(answer), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
