"""A proxy between an HTTP client and a server that is slow and fails on purpose, and counts what passes through it.

    client --keep-alive--> Proxy --keep-alive--> server

Requests go on byte for byte, ``Host`` included, over which an S3 client signs. Every request waits ``latency_s``; a
seeded share of them then meets one of the ``faults`` in place of its answer:

    slow_down  503 with S3's XML, without asking the server
    reset      the connection ends with RST, without asking the server
    truncate   the answer's head and half of its body, then the connection ends
    hang       nothing comes, until the proxy ends

The n-th request meets the n-th draw. Cost: a thread a connection, about a millisecond a request, and each answer in
memory once. As a script it serves until it is ended, and writes what it counted to standard error:

    python -m tests.proxy --listen 9000 --to 127.0.0.1:8333 --latency-s 0.05 --fail 0.05
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

FAULTS = ("slow_down", "reset", "truncate", "hang")
PASSING = FAULTS[:3]  # those that are over at once
_HOP_HEADERS = ("connection", "keep-alive", "transfer-encoding", "expect", "proxy-connection")
_SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)


_Answer = tuple[int, list[tuple[str, str]], bytes]


class Proxy:
    """A running proxy; a context manager that ends it.

    Args:
        to: ``HOST:PORT`` of the server, or its ``http://`` URL.
        listen: port on 127.0.0.1; 0 takes a free one.
        latency_s: seconds that every request waits before it is passed on.
        fail: share of the requests that meet a fault, 0 to 1.
        faults: which ones, drawn evenly.
        seed: of the draws.
        only: a fault is met by requests alone for which this is true, given method and path; None is all.

    Attributes:
        requests, sent_bytes, failed: by path without its query: requests, bytes of answers' bodies, faults met.
        most_at_once: requests in flight at the same time, at most.
    """

    def __init__(
        self,
        to: str,
        *,
        listen: int = 0,
        latency_s: float = 0.0,
        fail: float = 0.0,
        faults: Sequence[str] = PASSING,
        seed: int = 0,
        only: Callable[[str, str], bool] | None = None,
    ) -> None:
        assert set(faults) <= set(FAULTS), faults
        self.to, self.latency_s, self.fail, self.faults = to.removeprefix("http://"), latency_s, fail, tuple(faults)
        self.only = only
        self.requests: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.most_at_once = self._at_once = 0
        self._draw, self._lock, self._ended = random.Random(seed), threading.Lock(), threading.Event()
        self._open: set[socket.socket] = set()
        self._server = _Server(("127.0.0.1", listen), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """The proxy's own URL, in place of the server's."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the proxy and every connection."""
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def counts(self) -> dict[str, Any]:
        """What passed through so far, in all."""
        with self._lock:
            sums = {name: sum(getattr(self, name).values()) for name in ("requests", "sent_bytes", "failed")}
            return {**sums, "most_at_once": self.most_at_once, "by_path": dict(self.requests)}

    def reset(self) -> None:
        """Counts from 0 again."""
        with self._lock:
            for counter in (self.requests, self.sent_bytes, self.failed):
                counter.clear()
            self.most_at_once = self._at_once

    def _enter(self, method: str, path: str) -> str | None:
        """Counts a request and says which fault it meets."""
        with self._lock:
            self.requests[path] += 1
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            fails, fault = self._draw.random() < self.fail, self._draw.choice(self.faults)
            if not fails or (self.only is not None and not self.only(method, path)):
                return None
            self.failed[path] += 1
            return fault

    def _leave(self, path: str, sent_bytes: int) -> None:
        with self._lock:
            self._at_once -= 1
            self.sent_bytes[path] += sent_bytes


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256
    proxy: Proxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news."""


class _Handler(BaseHTTPRequestHandler):
    """One client's connection, and the one to the server that belongs to it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server
    upstream: http.client.HTTPConnection

    def setup(self) -> None:
        super().setup()
        self.upstream = http.client.HTTPConnection(self.server.proxy.to, timeout=60)
        with self.server.proxy._lock:
            self.server.proxy._open.add(self.connection)

    def finish(self) -> None:
        with self.server.proxy._lock:
            self.server.proxy._open.discard(self.connection)
        self.upstream.close()
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the standard library
        """Says nothing."""

    def _pass(self) -> None:
        proxy, path = self.server.proxy, urlsplit(self.path).path
        body = self._body()
        fault = proxy._enter(self.command, path)
        answer = None
        try:
            if proxy.latency_s:
                time.sleep(proxy.latency_s)  # the latency itself
            if fault == "hang":
                proxy._ended.wait()
            elif fault == "slow_down":
                answer = (
                    503,
                    [("Content-Type", "application/xml"), ("Content-Length", str(len(_SLOW_DOWN)))],
                    _SLOW_DOWN,
                )
            elif fault != "reset":
                answer = self._ask(body)
        finally:  # before the client has the answer, and can ask again
            data = b"" if answer is None or self.command == "HEAD" else answer[2]
            data = data[: len(data) // 2] if fault == "truncate" else data
            proxy._leave(path, len(data))
        if answer is None or (fault == "truncate" and not data):
            self._cut()
            return
        self.send_response_only(answer[0])
        for name, value in answer[1]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
        self.close_connection |= fault == "truncate"

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", "").lower():
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # trailers
        return b"".join(parts)

    def _ask(self, body: bytes) -> _Answer | None:
        """The server's answer, read to its end; None where it gives none."""
        for _ in range(2):  # the server may have ended the idle connection
            try:
                self.upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() not in (*_HOP_HEADERS, "content-length"):
                        self.upstream.putheader(name, value)
                if body or self.command in ("PUT", "POST"):
                    self.upstream.putheader("Content-Length", str(len(body)))
                self.upstream.endheaders(body or None)
                answer = self.upstream.getresponse()
                data = answer.read()
            except (OSError, http.client.HTTPException):
                self.upstream.close()
                continue
            headers = [item for item in answer.getheaders() if item[0].lower() not in _HOP_HEADERS]
            if answer.getheader("Content-Length") is None:
                headers.append(("Content-Length", str(len(data))))
            return answer.status, headers, data
        return None

    def _cut(self) -> None:
        """Ends the client's connection with RST."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.rfile.close()  # the socket is closed when nothing refers to it


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m tests.proxy", description=__doc__)
    parser.add_argument("--listen", type=int, default=0, metavar="PORT", help="0 takes a free one, and says which")
    parser.add_argument("--to", required=True, metavar="HOST:PORT")
    parser.add_argument("--latency-s", type=float, default=0.0)
    parser.add_argument("--fail", type=float, default=0.0, metavar="SHARE")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=PASSING)
    parser.add_argument("--seed", type=int, default=0)
    known = parser.parse_args(arguments)
    ended = threading.Event()

    def end(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        ended.set()

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, end)
    with Proxy(**vars(known)) as proxy:
        print(proxy.endpoint, flush=True)
        ended.wait()
        print(json.dumps(proxy.counts()), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
