"""Requests to a store: bounded in number at a time, tried again one by one, counted; and files read by such requests.

Guarantees: at most ``storage.max_requests`` requests of a ``Storage``, and so of an actor, are under way, pauses
between tries apart; a read that fails is tried again where it failed, so a row group of a hundred requests is not begun
anew; fewer bytes than the file's size promises are a failure, never an end.

Cost: 3 µs a request. Arrow gets the bytes without a copy.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa

from ingest.config import StorageConfig
from ingest.retry import retrying

T = TypeVar("T")


@dataclass(frozen=True)
class Traffic:
    """What was asked of a store.

    Args:
        requests: tries of opening, reading, listing and writing; a listing or a write counts as one.
        read_bytes: bytes that came of reading files.
        retries: of the requests, those made because one before had failed.
    """

    requests: int = 0
    read_bytes: int = 0
    retries: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.requests + other.requests, self.read_bytes + other.read_bytes, self.retries + other.retries)

    def __sub__(self, other: Traffic) -> Traffic:
        return self + Traffic(-other.requests, -other.read_bytes, -other.retries)


class Requests:
    """Makes requests; safe to share between threads.

    Args:
        config: how many at a time, and how often and how long each is tried.
    """

    def __init__(self, config: StorageConfig) -> None:
        self._config = config
        self._slots = threading.BoundedSemaphore(config.max_requests)
        self._lock = threading.Lock()
        self.traffic = Traffic()

    def __call__(self, action: Callable[[], T], what: str, num_bytes: int = 0) -> T:
        """Runs one request.

        Args:
            action: must be safe to repeat.
            what: names it in errors, such as ``open s3://bucket/a.parquet``.
            num_bytes: that it brings.

        Raises:
            StorageError: see ``retrying``.
        """
        tries = 0

        def request() -> T:
            nonlocal tries
            tries += 1
            with self._slots:
                self._count(Traffic(1, 0, int(tries > 1)))
                return action()

        result = retrying(request, what, self._config)
        self._count(Traffic(0, num_bytes, 0))
        return result

    def _count(self, more: Traffic) -> None:
        with self._lock:
            self.traffic += more


class RangedFile:
    """What Arrow calls to read a file of a store: the methods of a Python file, each read a request of its own.

    Args:
        native: the store's file; anything with ``size``, ``read_at`` and ``close``.
        path: names the file in errors.
        requests: makes the requests.
    """

    def __init__(self, native: Any, path: str, requests: Requests) -> None:
        self._native, self._path, self._requests = native, path, requests
        self._size, self._at = native.size(), 0
        self.closed = False

    def read(self, num_bytes: int = -1) -> bytes:
        """The next bytes, as many as there are."""
        left = max(0, self._size - self._at)
        wanted, at = left if num_bytes < 0 else min(num_bytes, left), self._at

        def read_at() -> bytes:
            data: bytes = self._native.read_at(wanted, at)
            if len(data) != wanted:
                raise OSError(errno.EIO, f"only got {len(data)} of {wanted} bytes at {at}")
            return data

        data = self._requests(read_at, f"read {self._path}", wanted) if wanted else b""
        self._at += wanted
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to ``offset`` from the start, from here, or from the end."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def close(self) -> None:
        """Ends the reading."""
        self.closed = True
        self._native.close()


def ranged(native: Any, path: str, requests: Requests) -> pa.NativeFile:
    """A file of a store as Arrow takes it, read by ``requests``."""
    return pa.PythonFile(RangedFile(native, path, requests), mode="r")
