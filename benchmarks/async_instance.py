"""Serves as the instance of async_inference.py: reads a body of any length and answers with a fixed number of bytes.

python -m benchmarks.async_instance NUM_BYTES      prints its port

A body of less than 1,000 bytes gets an answer of the same length.
"""

import asyncio
import sys

PIECE = bytes(1 << 20)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_bytes: int) -> None:
    """Answer the one request of a connection: the proxy's workers use a connection once."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if head.startswith(b"get /ping"):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    else:
        num_left = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        if num_left < 1000:
            num_bytes = num_left
        while num_left:
            num_left -= len(await reader.read(min(num_left, 1 << 20)))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-bytes\r\ncontent-length: %d\r\n\r\n" % num_bytes)
        while num_bytes:
            piece = PIECE[:num_bytes]
            writer.write(piece)
            await writer.drain()
            num_bytes -= len(piece)
    await writer.drain()
    writer.close()


async def main() -> None:
    num_bytes = int(sys.argv[1])
    server = await asyncio.start_server(lambda r, w: answer(r, w, num_bytes), "127.0.0.1", 0, limit=1 << 21)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
