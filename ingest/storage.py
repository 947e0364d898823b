"""Files, local or in an object store: with ``stores.py``, the only module that touches a filesystem.

Guarantees: a path is taken as it is written, so names with spaces, ``%``, ``#`` and Unicode work; a transient error is
tried again, a permanent one ends at once, and both name the path; requests are bounded in number at a time and counted;
no message holds a credential.

Cost: one request opens a file (S3: HEAD); a directory or glob is one recursive listing, 1,000 names a request. A glob
in the last part alone, such as ``part-*.parquet``, lists that one directory only.

One layer tries again: ours, request by request (``ranged.py``), where it is counted and bounded; the S3 client repeats
nothing, but for curl, which takes a new connection where one that it reuses is reset before any answer. Only listings
and writes, which are many requests in one call, go through a second client that repeats each of them up to
``max_attempts`` times within a second, so that one lost page does not restart a listing of 100,000 names. The clients
of GCS, Azure and HDFS have retries of their own below ours, with the limits of those libraries.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import fs

from ingest.config import StorageConfig
from ingest.errors import DataError, StorageError
from ingest.glob import glob_regex, is_glob, split_glob
from ingest.ranged import Requests, Traffic, ranged
from ingest.retry import one_line
from ingest.stores import Place, Stores

__all__ = ["FileInfo", "Storage"]

T = TypeVar("T")


@dataclass(frozen=True)
class FileInfo:
    """One file as a listing shows it.

    Args:
        path: absolute local path, or URI with its scheme; ``Storage.open`` takes it.
        size_bytes: length of the file.
        version: changes when the file is rewritten: modification time in ns as text, '' where the store gives none. S3
            gives whole seconds.
    """

    path: str
    size_bytes: int
    version: str


class Storage:
    """Lists, opens, reads and writes files on every store that Arrow speaks to.

    Picklable: only the settings travel; each process makes its own connections when it first needs them. Safe to share
    between threads.

    Args:
        config: endpoint, region, retries and timeouts. Credentials come from the environment.
    """

    def __init__(self, config: StorageConfig = StorageConfig()) -> None:  # noqa: B008 - frozen
        self.config = config
        self._requests = Requests(config)
        self._stores = Stores(config)

    def __reduce__(self) -> tuple[type[Storage], tuple[StorageConfig]]:
        return Storage, (self.config,)

    @property
    def traffic(self) -> Traffic:
        """What this object asked of its stores so far."""
        return self._requests.traffic

    def find_parquet(self, paths: Sequence[str]) -> list[FileInfo]:
        """Finds the files that paths stand for.

        A directory is searched recursively for names ending in ``.parquet`` in any case. Names, and directories below
        the given one, that start with ``_`` or ``.`` are passed over, and so are files of 0 bytes. A glob knows ``*``,
        ``?``, ``[..]`` and ``**``; it may match directories. A path that names a file is taken as it is.

        Returns:
            Files sorted by path, each once.

        Raises:
            StorageError: a path stands for no file, or cannot be listed.
            DataError: a file that was named explicitly has 0 bytes.
            ConfigError: a scheme or the endpoint is wrong, or a path holds a credential.
        """
        found = {item.path: item for path in paths for item in self._find(path)}
        first: dict[str, FileInfo] = {}  # a file that several local links lead to is one file
        for path in sorted(found):
            first.setdefault(path if "://" in path else os.path.realpath(path), found[path])
        return list(first.values())

    def open(self, path: str) -> pa.NativeFile:
        """Opens a file for random access; each read is a request, tried again and counted.

        Raises:
            StorageError: no such file, no permission, or the store does not answer; from the file's methods too.
        """
        return ranged(self._do(f"open {path}", lambda: self._native(path)), path, self._requests)

    def _native(self, path: str) -> Any:
        """A file as its store's client opens it: the seam at which tests put a store of theirs."""
        place = self._stores.place(path)
        return place.filesystem.open_input_file(place.path)

    def read_bytes(self, path: str) -> bytes:
        """The whole content of a file.

        Raises:
            StorageError: as for ``open``.
        """
        with self.open(path) as file:
            data: bytes = file.read()
            return data

    def write_bytes(self, path: str, data: bytes) -> None:
        """Writes a file; a reader sees the old content or the new, never a part. Makes missing directories.

        Raises:
            StorageError: the path cannot be written.
        """
        place = self._stores.place(path)
        local = isinstance(place.filesystem, fs.LocalFileSystem)
        self._do(f"write {path}", lambda: _write_local(place.path, data) if local else _write_remote(place, data))

    def info(self, path: str) -> FileInfo | None:
        """Size and version of a file; None when there is no such file.

        Raises:
            StorageError: the store does not answer, or forbids the look.
        """
        place = self._stores.place(path)
        item = self._stat(place, path)
        return _file_info(place, item) if item.type == fs.FileType.File else None

    def _find(self, path: str) -> Iterator[FileInfo]:
        place = self._stores.place(path)
        item = self._stat(place, path)
        if item.type == fs.FileType.File:
            if not item.size:
                raise DataError(f"file must not be empty; {path} has 0 bytes: write it again or leave it out")
            yield _file_info(place, item)
            return
        if item.type == fs.FileType.Directory:
            found, searched = self._list(place, place.path, "**"), "directory"
        elif is_glob(place.path):
            base, pattern = split_glob(place.path)
            found, searched = self._list(place, base, pattern), "glob"
        else:
            raise StorageError(
                f"path must name a file, a directory or a glob; {path} does not exist: check its spelling"
            )
        if not found:
            raise StorageError(
                f"{searched} must hold Parquet files; {path} holds none (names that start with _ or . and files of 0"
                " bytes are passed over): check the path and the names"
            )
        yield from found

    def _list(self, place: Place, base: str, pattern: str) -> list[FileInfo]:
        """Files below ``base`` whose path from there matches ``pattern``, or lies in a directory that does."""
        recursive = "/" in pattern or pattern in ("*", "**")
        matches = glob_regex(pattern).fullmatch
        base = base.rstrip("/") or base
        selector = fs.FileSelector(base, recursive=recursive, allow_not_found=True)
        local = recursive and isinstance(place.filesystem, fs.LocalFileSystem)
        items = self._do(
            f"list {place.name(base)}",
            lambda: place.patient.get_file_info(list(_walk(base)) if local else selector),
        )
        found = []
        for item in items:
            inside = item.path[len(base) :].lstrip("/")
            if any(part.startswith(("_", ".")) for part in inside.split("/")) or not matches(inside):
                continue
            if item.type == fs.FileType.File and item.size:
                found.append(_file_info(place, item))
            elif item.type == fs.FileType.Directory and not recursive:
                found += self._list(place, item.path, "**")
        return found

    def _stat(self, place: Place, path: str) -> Any:
        return self._do(f"look up {path}", lambda: place.filesystem.get_file_info(place.path))

    def _do(self, what: str, action: Callable[[], T]) -> T:
        try:
            return self._requests(action, what)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise StorageError(f"{what} failed; {one_line(error)}: correct the path") from error


def _file_info(place: Place, item: Any) -> FileInfo:
    version = "" if item.mtime_ns is None else str(item.mtime_ns)
    return FileInfo(place.name(item.path), item.size, version)


def _walk(base: str, within: tuple[tuple[int, int], ...] = ()) -> Iterator[str]:
    """Everything below a local directory, links followed, but not into a directory that the link lies in.

    Arrow's recursive selector follows such a link some forty times, and two of them side by side for ever.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        state = os.stat(base)
        if (identity := (state.st_dev, state.st_ino)) in within:
            return
        with os.scandir(base) as entries:
            for entry in entries:
                yield entry.path
                if entry.is_dir() and not entry.name.startswith(("_", ".")):
                    yield from _walk(entry.path, (*within, identity))


def _write_local(path: str, data: bytes) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex}.part")
    try:
        part.write_bytes(data)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _write_remote(place: Place, data: bytes) -> None:
    if not isinstance(place.patient, fs.S3FileSystem | fs.GcsFileSystem):
        place.patient.create_dir(place.path.rpartition("/")[0], recursive=True)
    with place.patient.open_output_stream(place.path, compression=None) as file:  # Arrow zips names in .gz
        file.write(data)
