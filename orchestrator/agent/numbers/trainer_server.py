"""HTTP server of the trainers' reports: one at a time, of bounded size and rate. Loaded by the first report."""

from __future__ import annotations

import hmac
import re
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer

BODY_BYTES_MAX = 64 << 10
READ_S_MAX = 1.0
"""How long a client may be silent within a report."""

REPORTS_PER_S_MAX = 20
"""How many reports of a rank are taken in a second. The protocol's clients send one in 5 s, and the last one at once."""

RANKS_MAX = 4096
_SIZE = re.compile(r"[0-9]{1,9}")
_PATH = re.compile(r"/ranks/([0-9]{1,9})")


def serve(listener: socket.socket, token: str, accept: Callable[[int, bytes], None]) -> None:
    """Serve reports for good. `accept` gets rank and body of each, and raises ValueError when it cannot be read."""
    _Server(listener, token, accept).serve_forever(poll_interval=60.0)


class _Server(HTTPServer):
    def __init__(self, listener: socket.socket, token: str, take: Callable[[int, bytes], None]) -> None:
        super().__init__(listener.getsockname(), _ReportRequest, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.take = take
        self.expected = f"Bearer {token}".encode()
        # Of each rank, when the present second began, and how many of its reports were taken in it
        self.accepted: dict[int, tuple[float, int]] = {}

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: the client has gone, or was too slow."""


class _ReportRequest(BaseHTTPRequestHandler):
    server: _Server
    timeout = READ_S_MAX

    def do_POST(self) -> None:
        self.send_response(self._accept())
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _accept(self) -> HTTPStatus:
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, self.server.expected):
            return HTTPStatus.UNAUTHORIZED
        path, size = _PATH.fullmatch(self.path), self.headers.get("Content-Length", "")
        if path is None:
            return HTTPStatus.NOT_FOUND
        if _SIZE.fullmatch(size) is None or int(size) > BODY_BYTES_MAX:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        rank, now_s, taken = int(path[1]), time.monotonic(), self.server.accepted
        began_s, count = taken.get(rank, (now_s, 0))
        if now_s >= began_s + 1.0:
            began_s, count = now_s, 0
        if count >= REPORTS_PER_S_MAX or (rank not in taken and len(taken) >= RANKS_MAX):
            return HTTPStatus.TOO_MANY_REQUESTS
        taken[rank] = began_s, count + 1
        try:
            self.server.take(rank, self.rfile.read(int(size)))
        except ValueError:
            return HTTPStatus.BAD_REQUEST
        return HTTPStatus.OK

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: an agent's log is for what people must know."""
