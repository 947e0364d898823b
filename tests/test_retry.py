"""What is tried again, how often and how long; requests one by one; and a store that fails."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path

import numpy as np
import pytest

from ingest.config import IngestConfig, StorageConfig
from ingest.errors import StorageError
from ingest.ranged import Requests, Traffic, ranged
from ingest.retry import classify, retrying
from ingest.run import Run
from ingest.storage import Storage
from tests.conftest import lines_of, read_lines, steps_without_ray, texts, write_config, write_corpus
from tests.proxy import Proxy


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FileNotFoundError(errno.ENOENT, "no such file"), "permanent"),
        (PermissionError(errno.EACCES, "denied"), "permanent"),
        (OSError(errno.ENOSPC, "disk full"), "permanent"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "transient"),
        (TimeoutError("read"), "transient"),
        (OSError(errno.EIO, "only got 3 of 5 bytes"), "transient"),
        (OSError("AWS Error SLOW_DOWN during GetObject operation: busy"), "transient"),
        (OSError("AWS Error UNKNOWN (HTTP status 503) during HeadObject operation: No response body."), "transient"),
        (OSError("AWS Error UNKNOWN (HTTP status 400) during HeadObject operation: No response body."), "permanent"),
        (OSError("AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 28, Timeout"), "transient"),
        (OSError("AWS Error ACCESS_DENIED during ListObjectsV2 operation: Access Denied."), "permanent"),
        (OSError("AWS Error NO_SUCH_BUCKET during ListObjectsV2 operation: no"), "permanent"),
        (OSError("AWS Error SIGNATURE_DOES_NOT_MATCH during ListObjectsV2 operation: no"), "permanent"),
        (OSError("google::cloud::Status(UNAVAILABLE: try again)"), "transient"),
        (OSError("google::cloud::Status(NOT_FOUND: no such object)"), "permanent"),
        (OSError("Couldn't deserialize thrift: No more data to read."), "permanent"),
        (OSError("CRC checksum verification failed for page_ordinal 0"), "permanent"),
    ],
)
def test_errors_are_told_apart(error, expected):
    assert classify(error) == expected


def failing(times, error):
    left = [error] * times

    def action():
        if left:
            raise left.pop()
        return "done"

    return action, left


def test_a_transient_error_is_tried_again_with_growing_pauses():
    action, _ = failing(4, ConnectionResetError(errno.ECONNRESET, "reset"))
    pauses = []
    assert retrying(action, "open s3://b/a", StorageConfig(max_attempts=5), pauses.append) == "done"
    assert len(pauses) == 4
    assert all(full / 2 <= pause <= full for pause, full in zip(pauses, (0.1, 0.4, 1.6, 6.4), strict=True))


def test_the_tries_are_bounded_and_the_error_names_the_action():
    action, left = failing(9, ConnectionResetError(errno.ECONNRESET, "reset"))
    with pytest.raises(StorageError, match=r"open s3://b/a failed after 3 tries; .*reset: check the network"):
        retrying(action, "open s3://b/a", StorageConfig(max_attempts=3), [].append)
    assert len(left) == 6


def test_a_permanent_error_is_not_tried_again():
    action, left = failing(9, OSError("AWS Error ACCESS_DENIED during GetObject operation: Access Denied."))
    with pytest.raises(StorageError, match=r"open s3://b/a failed; .*: check the permissions and the credentials"):
        retrying(action, "open s3://b/a", StorageConfig(), [].append)
    assert len(left) == 8


def test_no_try_begins_after_the_deadline():
    action, left = failing(9, ConnectionResetError(errno.ECONNRESET, "reset"))
    now = [0.0]

    def sleep(pause_s):
        now[0] += pause_s + 1.0  # each try takes a second

    with pytest.raises(StorageError, match=r"open s3://b/a failed after 3 tries; .*reset: check the network"):
        retrying(action, "open s3://b/a", StorageConfig(retry_deadline_s=3.0), sleep, lambda: now[0])
    assert len(left) == 6
    assert now[0] <= 3.0


class Native:
    """A store's file of bytes that fails the reads numbered in ``failures``, from 1, and gives others too short."""

    def __init__(self, data, failures=(), short=()):
        self.data, self.failures, self.short, self.reads = data, failures, short, 0

    def size(self):
        return len(self.data)

    def read_at(self, num_bytes, offset):
        self.reads += 1
        if self.reads in self.failures:
            raise OSError("AWS Error SLOW_DOWN during GetObject operation: busy")
        return self.data[offset : offset + num_bytes - (self.reads in self.short)]

    def close(self):
        pass


def test_reads_are_counted_and_tried_again_one_by_one():
    requests, native = Requests(StorageConfig()), Native(bytes(range(100)), failures=[2], short=[3])
    file = ranged(native, "a", requests)
    assert file.read(10) == bytes(range(10))
    assert file.read(10) == bytes(range(10, 20))
    assert file.read_at(5, 95) == bytes(range(95, 100))
    assert (file.size(), file.tell(), native.reads) == (100, 100, 5)
    assert (file.read(), file.read_at(10, 98)) == (b"", b"bc")
    assert requests.traffic == Traffic(requests=6, read_bytes=27, retries=2)
    assert requests.traffic - Traffic(1, 2, 1) == Traffic(5, 25, 1)


def test_a_file_that_stays_too_short_is_an_error_that_names_it():
    file = ranged(Native(b"abc", short=range(9)), "s3://b/a", Requests(StorageConfig(max_attempts=2)))
    with pytest.raises(StorageError, match=r"read s3://b/a failed after 2 tries; .*only got 2 of 3 bytes at 0: check"):
        file.read()


def test_no_more_requests_are_under_way_than_allowed():
    requests, lock, now, most = Requests(StorageConfig(max_requests=3)), threading.Lock(), [0], [0]
    meeting = threading.Barrier(3)  # of the three that are allowed: each waits for the others

    def action():
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        meeting.wait(10)
        with lock:
            now[0] -= 1

    threads = [threading.Thread(target=requests, args=(action, "wait")) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (most[0], now[0], requests.traffic.requests) == (3, 0, 12)


@pytest.fixture
def bucket(s3_endpoint, tmp_path, tokenizer_file, request):
    """A corpus of 12 files on S3 under a prefix of the test's own, and the config of a run over it."""
    prefix = f"s3://data/{request.node.name}"
    storage = Storage(StorageConfig(endpoint=s3_endpoint, region="us-east-1"))
    for path in write_corpus(tmp_path / "corpus", texts(480), files=12):
        storage.write_bytes(f"{prefix}/{path.name}", path.read_bytes())

    def config(endpoint: str, **storage: object) -> Path:
        return write_config(
            tmp_path / "run.yaml",
            sources=[{"name": "only", "path": prefix}],
            tokenizer={"path": str(tokenizer_file), "backend": "tokenizers"},
            storage={"endpoint": endpoint, "region": "us-east-1", "request_timeout_s": 10, **storage},
        )

    return config


def of_objects(method, path):
    """Not the listing, whose retries are the client's."""
    return path.endswith(".parquet")


@pytest.mark.s3
def test_a_store_that_fails_one_request_in_ten_gives_the_same_steps_and_the_retries_are_counted(bucket, s3_endpoint):
    clean = lines_of(steps_without_ray(bucket(s3_endpoint)))
    with Proxy(s3_endpoint, fail=0.1, seed=3, only=of_objects) as proxy:
        config = IngestConfig.from_yaml(bucket(proxy.endpoint))
        run = Run.prepare(config, rebuild=True)
        indexed = run.storage.traffic
        digests = [int(window.prefix.digest_O[-1]) for window in map(run.maker, run.specs(run.start().cursors))]
        failed = sum(proxy.failed.values())
        traffic = run.storage.traffic
    assert sum(digests) % 2**64 == sum(int(line["digest"], 16) for line in clean) % 2**64
    # curl itself repeats a request on a connection that was reset before the first byte of an answer
    assert failed // 3 < traffic.retries <= failed
    assert 0 < indexed.retries < traffic.retries
    assert len(clean) > 20


@pytest.mark.s3
def test_listings_and_writes_survive_a_store_that_fails(s3_endpoint):
    with Proxy(s3_endpoint, fail=0.2, faults=["slow_down"], seed=1) as proxy:
        storage = Storage(StorageConfig(endpoint=proxy.endpoint, region="us-east-1"))
        for number in range(20):
            storage.write_bytes(f"s3://data/survive/{number:02}.parquet", b"x")
        assert len(storage.find_parquet(["s3://data/survive"])) == 20
        assert proxy.counts()["failed"] > 3


@pytest.mark.s3
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("slow_down", "HTTP status 503"),
        ("reset", "NETWORK_CONNECTION"),
        ("truncate", "NETWORK_CONNECTION"),
        ("hang", "curlCode: 28, Timeout"),
    ],
)
def test_a_store_that_always_fails_is_given_up_after_the_tries_with_the_object_s_name(s3_endpoint, fault, words):
    Storage(StorageConfig(endpoint=s3_endpoint, region="us-east-1")).write_bytes("s3://data/fails/a", b"x" * 9999)
    with Proxy(s3_endpoint, fail=1, faults=[fault]) as proxy:
        storage = Storage(
            StorageConfig(endpoint=proxy.endpoint, region="us-east-1", max_attempts=2, request_timeout_s=1)
        )
        with pytest.raises(StorageError, match=rf"s3://data/fails/a failed after 2 tries; .*{words}.*: check the netw"):
            storage.read_bytes("s3://data/fails/a")
        assert proxy.counts()["requests"] == 2
        assert storage.traffic == Traffic(requests=2, read_bytes=0, retries=1)


@pytest.mark.s3
def test_a_body_that_is_cut_is_read_again_and_never_taken_for_the_whole(s3_endpoint):
    data = np.random.default_rng(0).bytes(300_000)
    Storage(StorageConfig(endpoint=s3_endpoint, region="us-east-1")).write_bytes("s3://data/cut/a", data)
    with Proxy(s3_endpoint, fail=0.7, faults=["truncate"], seed=1, only=lambda method, path: method == "GET") as proxy:
        storage = Storage(StorageConfig(endpoint=proxy.endpoint, region="us-east-1", max_attempts=20))
        with storage.open("s3://data/cut/a") as file:
            assert b"".join(file.read(100_000) for _ in range(3)) == data
        assert storage.traffic.retries == proxy.counts()["failed"] > 0


@pytest.mark.s3
def test_requests_to_a_slow_store_are_bounded_in_number_at_a_time(bucket, s3_endpoint):
    with Proxy(s3_endpoint, latency_s=0.02) as proxy:
        Run.prepare(IngestConfig.from_yaml(bucket(proxy.endpoint, max_requests=3)), rebuild=True)
        assert proxy.most_at_once == 3
        proxy.reset()
        Run.prepare(IngestConfig.from_yaml(bucket(proxy.endpoint)), rebuild=True)
        assert 3 < proxy.most_at_once <= 32


@pytest.mark.s3
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_actors_that_read_from_a_store_that_fails_give_the_same_stream_and_say_how_often(
    bucket, s3_endpoint, no_ray, started, tmp_path
):
    expected = lines_of(steps_without_ray(bucket(s3_endpoint)))
    with Proxy(s3_endpoint, fail=0.05, seed=2, only=of_objects) as proxy:
        command = ["-m", "ingest.cli", "stream", bucket(proxy.endpoint), "--json", "--digests", tmp_path / "lines"]
        done = started(*command, RAY_ADDRESS="local").wait(200)
        counts = proxy.counts()
    assert done.code == 0, done.err
    assert read_lines(tmp_path / "lines") == expected
    storage = json.loads(done.out)["storage"]
    assert 0 < storage["retries"] <= counts["failed"]
    assert 0 < storage["requests"] <= counts["requests"]
    assert 0 < storage["read_bytes"] <= counts["sent_bytes"]
