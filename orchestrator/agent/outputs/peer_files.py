"""Files of checkpoints from the memory of one agent to another's, over TLS with a key of the job and its token.

A request is one line: the token, and JSON with a folder and the names of files in it. The answer has for each file a line with its
size and time, its bytes, and its size and time once more, so that nothing is taken that changed meanwhile; it ends where a file may not
or cannot be sent. A stranger is cut off before anything that it sends is looked at.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
import socket
import socketserver
import tempfile
import threading
from collections.abc import Collection, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import Any, BinaryIO

from orchestrator.core import codec
from orchestrator.core.checkpoints import disk, formats
from orchestrator.core.checkpoints.checkpoint import CheckpointFile
from orchestrator.core.jobdir.durable import LINE_BYTES_MAX
from orchestrator.core.wire import connection

BLOCK_BYTES = 1 << 20
CONNECTIONS_MAX = 64
"""How many connections a server has at a time; more are closed at once."""

CONNECT_S_MAX, REQUEST_S_MAX, SILENCE_S_MAX = 5.0, 10.0, 10.0
"""How long a client waits for a connection, a server for the next bytes of a request, and either for the other later on: less than
it takes until a host counts as lost, since what the next attempt begins from is fetched after it."""

_FAULTS = (OSError, ValueError, KeyError, TypeError, codec.CodecError)
"""What a peer can cause."""


class PeerServer(socketserver.ThreadingTCPServer):
    """Server, in threads, of the regular files below `roots`; a file behind a link counts where it is."""

    daemon_threads, request_queue_size = True, CONNECTIONS_MAX

    def __init__(self, token: str, certificate_pem: str, key_pem: str, roots: Collection[Path], folder: Path) -> None:
        """`folder`: for the file with the key, which exists for an instant. Raises OSError."""
        with tempfile.NamedTemporaryFile(dir=folder) as file:  # only its owner can read it
            file.write(f"{certificate_pem}\n{key_pem}".encode())
            file.flush()
            self._context = connection.server_context(Path(file.name), Path(file.name))
        self._token, self._roots = token.encode(), roots
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__(("", 0), socketserver.BaseRequestHandler)
        threading.Thread(target=self.serve_forever, name="peers", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self.shutdown()
        self.server_close()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether there may be one more connection."""
        return self._slots.acquire(blocking=False)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve a client; whatever fails, it sees that the connection has ended."""
        request.settimeout(REQUEST_S_MAX)
        try:
            tls = self._context.wrap_socket(request, server_side=True)
            with tls, tls.makefile("rwb") as stream:
                given, _, text = stream.readline(LINE_BYTES_MAX).partition(b" ")
                if hmac.compare_digest(given, self._token):
                    tls.settimeout(SILENCE_S_MAX)
                    self._answer(stream, codec.loads_plain(text))
        except _FAULTS:
            pass
        finally:
            self._slots.release()

    def _answer(self, stream: BufferedIOBase, asked: dict[str, Any]) -> None:
        for name in asked["names"]:
            with formats.open_regular(Path(asked["root"], name)) as file:
                real = Path(f"/proc/self/fd/{file.fileno()}").readlink()
                if not any(real.is_relative_to(os.path.realpath(root)) for root in self._roots):
                    return
                stream.write(_stamp(file))
                shutil.copyfileobj(file, stream, BLOCK_BYTES)
                stream.write(_stamp(file))


def _stamp(file: BinaryIO) -> bytes:
    about = os.fstat(file.fileno())
    return b"%d %d\n" % (about.st_size, about.st_mtime_ns)


def fetch(
    addresses: Sequence[str],
    token: str,
    certificate_pem: str,
    root: str,
    files: Sequence[CheckpointFile],
    stage: Path,
    pace: disk.Pace,
) -> str:
    """Fetch files of a folder from the agent that listens at one of these addresses into the folder `stage`; return why they are not
    all there, empty if they are: with the size, time and sha256 of their records. What `pace` raises passes through."""
    context, failures = connection.client_context(certificate_pem), list[str]()
    for address in addresses:
        todo = [piece for piece in files if not disk.matches_record(stage, piece)]
        try:
            plain = socket.create_connection(connection.parse_address(address), CONNECT_S_MAX)
            with plain, context.wrap_socket(plain, server_hostname="orch") as tls, tls.makefile("rwb") as stream:
                tls.settimeout(SILENCE_S_MAX)
                request = codec.dumps_plain({"root": root, "names": [piece.name for piece in todo]})
                stream.write(f"{token} {request}\n".encode())
                stream.flush()
                for piece in todo:
                    _receive(stream, piece, stage / piece.name, pace)
            return ""
        except _FAULTS as err:
            failures.append(f"{address}: {err}")
    return "; ".join(failures) or "the address of its agent is not known"


def _receive(stream: BufferedIOBase, piece: CheckpointFile, target: Path, pace: disk.Pace) -> None:
    """Receive a file. Raises LineError, OSError, ValueError."""
    _check_stamp(stream, piece)
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for left_bytes in range(piece.size_bytes, 0, -BLOCK_BYTES):
            block = stream.read(min(left_bytes, BLOCK_BYTES))
            file.write(block)
            digest.update(block)
            pace(len(block))
    _check_stamp(stream, piece)
    if piece.sha256 not in ("", digest.hexdigest()):
        raise connection.PeerError(f"{piece.name} differs from what was saved (sha256)")
    os.utime(target, ns=(piece.mtime_ns, piece.mtime_ns))


def _check_stamp(stream: BufferedIOBase, piece: CheckpointFile) -> None:
    numbers = [int(word) for word in stream.readline(LINE_BYTES_MAX).split()]
    if numbers[:1] != [piece.size_bytes] or not disk.is_same_time(numbers[-1], piece.mtime_ns):
        raise connection.PeerError(f"{piece.name} cannot be had from there, or not in this version")
