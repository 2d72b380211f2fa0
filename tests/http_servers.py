"""HTTP servers in this process, each on a free port and a thread of its own."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import Any

POLL_S = 0.01


class QuietHandler(BaseHTTPRequestHandler):
    """Does not log its requests."""

    def reply(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """Send an answer with its length. headers: further ones, or another length."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def run_http(server: HTTPServer) -> Iterator[str]:
    """Serve requests until the end of the block; yield the server's address."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(POLL_S,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def serve_http(handler: type[BaseHTTPRequestHandler]) -> AbstractContextManager[str]:
    """Run a server with this handler."""
    return run_http(ThreadingHTTPServer(("127.0.0.1", 0), handler))
