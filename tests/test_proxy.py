"""The proxy passes on what it gets, byte for byte, counts it, and fails as it is told to."""

from __future__ import annotations

import contextlib
import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ingest.config import StorageConfig
from ingest.errors import StorageError
from ingest.storage import Storage
from tests.proxy import Proxy


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        data = f"{self.headers['Host']} {self.path}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_PUT(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))[::-1]
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def echo():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@contextlib.contextmanager
def connected(proxy):
    connection = http.client.HTTPConnection(proxy.endpoint.removeprefix("http://"), timeout=10)
    try:
        yield connection
    finally:
        connection.close()


def ask(connection, method="GET", path="/a", **options):
    connection.request(method, path, **options)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_requests_pass_with_their_host_on_one_connection_and_are_counted(echo):
    with Proxy(echo) as proxy, connected(proxy) as connection:
        host = proxy.endpoint.removeprefix("http://")
        assert ask(connection, path="/x%20y?q=1") == (200, f"{host} /x%20y?q=1".encode())
        socket = connection.sock
        assert ask(connection, "PUT", "/a", body=b"abc") == (200, b"cba")
        assert ask(connection, "PUT", "/a", body=iter([b"de", b"f"]), encode_chunked=True) == (200, b"fed")
        assert connection.sock is socket
        assert proxy.requests == {"/x%20y": 1, "/a": 2}
        assert proxy.sent_bytes == {"/x%20y": len(host) + 11, "/a": 6}
        assert proxy.counts()["failed"] == 0
        proxy.reset()
        assert proxy.counts() == {"requests": 0, "sent_bytes": 0, "failed": 0, "most_at_once": 0, "by_path": {}}


def test_each_fault_is_what_its_name_says(echo):
    with Proxy(echo, fail=1, faults=["slow_down"]) as proxy, connected(proxy) as connection:
        status, body = ask(connection)
        assert (status, b"<Code>SlowDown</Code>" in body) == (503, True)
    with (
        Proxy(echo, fail=1, faults=["reset"]) as proxy,
        connected(proxy) as connection,
        pytest.raises(ConnectionResetError),
    ):
        ask(connection)
    with Proxy(echo, fail=1, faults=["truncate"]) as proxy, connected(proxy) as connection:
        with pytest.raises(http.client.IncompleteRead) as caught:
            ask(connection, "PUT", body=b"abcdef")
        assert caught.value.partial == b"fed"


def test_the_share_of_faults_is_drawn_from_the_seed_and_spares_what_it_must(echo):
    def statuses(seed, **options):
        with Proxy(echo, fail=0.5, faults=["slow_down"], seed=seed, **options) as proxy, connected(proxy) as connection:
            return [ask(connection, path=path)[0] for path in ("/a", "/b") * 10]

    assert statuses(1) == statuses(1) != statuses(2)
    spared = statuses(1, only=lambda method, path: path == "/b")
    assert set(spared[::2]) == {200}
    assert set(spared[1::2]) == {200, 503}


def test_a_request_that_hangs_ends_with_the_proxy(echo):
    with Proxy(echo, fail=1, faults=["hang"]) as proxy, connected(proxy) as connection:
        connection.request("GET", "/a")
        proxy.close()
        with pytest.raises((OSError, http.client.HTTPException)):
            connection.getresponse()


@pytest.mark.s3
def test_an_s3_client_reads_and_writes_through_the_proxy(s3_endpoint):
    with Proxy(s3_endpoint, latency_s=0.01) as proxy:
        storage = Storage(StorageConfig(endpoint=proxy.endpoint, region="us-east-1", request_timeout_s=10))
        storage.write_bytes("s3://data/proxy/a b.parquet", b"x" * 100_000)
        assert storage.read_bytes("s3://data/proxy/a b.parquet") == b"x" * 100_000
        assert [item.size_bytes for item in storage.find_parquet(["s3://data/proxy"])] == [100_000]
        assert proxy.sent_bytes["/data/proxy/a%20b.parquet"] >= 100_000
        with pytest.raises(StorageError, match=r"s3://data/proxy/none failed; .*: check the path"):
            storage.open("s3://data/proxy/none")
