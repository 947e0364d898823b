"""Reads the footers of one source and samples its first documents: files in, ``SourceManifest`` out.

A file that ``ingest pack`` wrote says so in its footer; a source holds such files only, or none. Their tokens are
counted and not estimated.

Cost: one request a file, 32 at a time; 3,000 small local files take 0.8 s on two cores. The sample takes at
most 256 KiB of text from each of 8 files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ingest.account import Bad
from ingest.chunks import column_chunks
from ingest.columns import Columns, Filtered, documents
from ingest.documents import Encode as EncodeRows
from ingest.documents import encode_rows as encoded
from ingest.errors import DataError
from ingest.footer import read_footer, require_bounds
from ingest.packed import SUMMARY, PackedFormat, packed_format, tokens_column
from ingest.parquet import find_columns, read_documents
from ingest.source import FileEntry, SourceManifest
from ingest.sources import SourceConfig
from ingest.spec import UnitSpec
from ingest.storage import FileInfo, Storage

Encode = Callable[[list[str]], tuple[npt.NDArray[Any], npt.NDArray[Any]]]
Progress = Callable[[str], None]
T = TypeVar("T")

_PROGRESS_S = 2.0
_SAMPLE_FILES, _SAMPLE_DOCUMENTS, _SAMPLE_BYTES = 8, 64, 256 << 10
_SAMPLE_REQUEST_BYTES = 1 << 20
_MOST_ROWS, _MOST_BYTES = 4096, 4 << 20  # looked at in a file whose filter leaves few
_TOKENS_PER_MIB_WITHOUT_TEXT = (1 << 20) // 4


class Ticker:
    """Says how many files are indexed, at most every 2 s, and once at the end."""

    def __init__(self, say: Progress, num_files: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._num_files, self._clock = say, num_files, clock
        self._count, self._next_s = 0, clock() + _PROGRESS_S

    def count(self, items: Iterable[T]) -> Iterator[T]:
        """Passes items on and counts them."""
        for item in items:
            self._count += 1
            if self._clock() >= self._next_s and self._count < self._num_files:
                self._line()
            yield item

    def end(self) -> None:
        """Says the last line."""
        self._line()

    def _line(self) -> None:
        self._say(f"indexed {self._count} of {self._num_files} files")
        self._next_s = self._clock() + _PROGRESS_S


class _Indexed(NamedTuple):
    entry: FileEntry
    row_groups: list[int]
    rows: list[int]
    text_bytes: list[int]
    packed: PackedFormat | None


def index_source(
    source: SourceConfig,
    files: list[FileInfo],
    storage: Storage,
    encode: Encode,
    pool: Executor,
    ticker: Ticker,
    encode_rows: EncodeRows | None = None,
) -> SourceManifest:
    """Indexes one source.

    Args:
        source: name and columns.
        files: in the order of the manifest.
        storage: opens them.
        encode: texts to (flat token ids, tokens of each text).
        pool: runs the reads; its threads bound the requests at a time.
        ticker: counts files.
        encode_rows: the source's own encoder; None where it is ``encode`` on plain text.

    Raises:
        DataError: a file is not Parquet, damaged, or has no such text column; there are no rows; some files are
            packed and others are text, or packed in another way; or a pack broke off.
        StorageError: a file cannot be read.
    """
    columns, skip = source.columns, source.allowed.skip_files > 0
    tried = list(ticker.count(pool.map(lambda file: _index_or_skip(storage, file, columns, skip), files)))
    skipped = tuple((file.path, item) for file, item in zip(files, tried, strict=True) if isinstance(item, str))
    indexed = [item for item in tried if not isinstance(item, str)]
    if not indexed:
        path, reason = skipped[0]
        raise DataError(
            f"source {source.name} must hold a file that can be read; got {len(files)} that cannot, the first is "
            f"{path}: {reason}"
        )
    packed = _one_format(source.name, indexed)
    if packed is not None:
        _require_finished(source.name, indexed, storage)
    full = [item for item in indexed if item.rows]
    if not full:
        raise DataError(f"source {source.name} must hold rows; its {len(files)} files hold none: check its path")
    chosen = columns.filter if packed is None else None
    read = full if chosen is None else [*_groups(full)]
    if chosen is not None and not read:
        raise DataError(
            f"source {source.name}: filter {chosen.text} must leave rows; by the statistics of "
            f"{sum(len(item.rows) for item in full)} row groups it leaves none: mend it, or leave the source out"
        )
    spread = (
        read if len(read) <= _SAMPLE_FILES else [read[i * len(read) // _SAMPLE_FILES] for i in range(_SAMPLE_FILES)]
    )
    skip = source.allowed.skip_rows > 0
    tokens_per_mib: int | None = 0
    bytes_per_row = 0
    if packed is None and encode_rows is not None:
        tokens_per_mib = _ratio(pool.map(lambda item: _sample_rows(storage, item, columns, skip, encode_rows), spread))
    elif packed is None:
        sampled = list(pool.map(lambda item: _sample(storage, item, columns, skip), spread))
        samples = [texts for texts, _ in sampled]
        tokens_per_mib = _tokens_per_mib(samples, encode)
        text_bytes = sum(len(text.encode()) for texts in samples for text in texts)
        bytes_per_row = text_bytes // max(1, sum(rows for _, rows in sampled))
    warnings = []
    if len(full) < len(indexed):
        warnings.append(f"{len(indexed) - len(full)} of {len(files)} files hold no rows")
    warnings += [f"skipped {path}: {reason}" for path, reason in skipped]
    if chosen is not None:
        sizes = [size for item in full for size in item.text_bytes]
        warnings.append(
            f"filter {chosen.text}: rows are those before it, tokens those behind it, as sampled; statistics "
            f"rule out {sizes.count(0)} of {len(sizes)} row groups, which are not read"
        )
    if tokens_per_mib is None:
        warnings.append(f"no text in the first documents of {len(spread)} files; sizes are guesses")
    return SourceManifest(
        name=source.name,
        files=tuple(item.entry for item in indexed),
        unit_file=np.repeat(np.arange(len(indexed)), [len(item.rows) for item in indexed]).astype(np.int32),
        unit_row_group=np.array([value for item in indexed for value in item.row_groups], np.int32),
        unit_rows=np.array([value for item in indexed for value in item.rows], np.int64),
        unit_text_bytes=np.array([value for item in indexed for value in item.text_bytes], np.int64),
        tokens_per_mib=_TOKENS_PER_MIB_WITHOUT_TEXT if tokens_per_mib is None else tokens_per_mib,
        warnings=tuple(warnings),
        packed=packed,
        skipped=skipped,
        bytes_per_row=bytes_per_row,
        filter=None if columns.filter is None else columns.filter.text,
    )


def require_files(source: SourceManifest, settings: SourceConfig) -> None:
    """Refuses a manifest that leaves out more files than ``on_error`` allows.

    Raises:
        DataError: names the first of them and why it cannot be read.
    """
    allowed = settings.allowed.files(len(source.files) + len(source.skipped))
    if len(source.skipped) > allowed:
        path, reason = source.skipped[0]
        raise DataError(
            f"source {source.name}: on_error.skip_files must cover the files that cannot be read; got "
            f"{len(source.skipped)}, {allowed} allowed, the first is {path}: {reason}"
        )


def _index_or_skip(storage: Storage, file: FileInfo, columns: Columns, skip: bool) -> _Indexed | str:
    """What is known of a file, or why it cannot be read."""
    try:
        return index_file(storage, file, columns)
    except DataError as error:
        if not skip:
            raise
        return str(error).removeprefix(file.path).lstrip(" :")


def index_file(storage: Storage, file: FileInfo, columns: Columns) -> _Indexed:
    """What the footer of a file says of its units.

    Raises:
        DataError: it is damaged, or lacks a column.
        StorageError: it cannot be read.
    """
    footer = read_footer(storage, file.path)
    packed = packed_format(footer.metadata, file.path)
    leaves = (
        [tokens_column(footer.metadata)] if packed is not None else find_columns(footer.metadata, columns, file.path)
    )
    entry = FileEntry(file.path, footer.size_bytes, footer.hash, file.version)
    groups = [(number, footer.metadata.row_group(number)) for number in range(footer.metadata.num_row_groups)]
    full = [(number, group) for number, group in groups if group.num_rows]
    numbers = [number for number, _ in full]
    chosen = columns.filter if packed is None else None
    asked = chosen.leaves(footer.metadata, file.path) if chosen else []
    of_groups = column_chunks(footer.metadata, numbers, leaves + asked, file.path, footer.size_bytes)
    require_bounds(footer, asked, file.path)
    out = chosen.excluded(footer.metadata, numbers) if chosen else set()  # of these no row counts
    return _Indexed(
        entry,
        numbers,
        [group.num_rows for _, group in full],
        [
            0 if number in out else sum(chunk.total_uncompressed_size for chunk in chunks[: len(leaves)])
            for number, chunks in zip(numbers, of_groups, strict=True)
        ],
        packed,
    )


def _one_format(name: str, indexed: list[_Indexed]) -> PackedFormat | None:
    """How all files are packed; None where all are text."""
    first = indexed[0]
    for item in indexed:
        if item.packed != first.packed:
            raise DataError(
                f"source {name} must hold files of one kind; {first.entry.path} holds {_kind(first.packed)}, "
                f"{item.entry.path} holds {_kind(item.packed)}: make two sources of them"
            )
    return first.packed


def _require_finished(name: str, indexed: list[_Indexed], storage: Storage) -> None:
    """Refuses what a pack left behind that broke off: its summary is written last."""
    for folder in dict.fromkeys(item.entry.path.rpartition("/")[0] for item in indexed):
        if storage.info(f"{folder}/{SUMMARY}") is None:
            raise DataError(
                f"source {name} must hold whole packs; {folder} holds no {SUMMARY}, which `ingest pack` writes last: "
                "pack into an empty directory again, or copy the file along if the pack was finished"
            )


def _kind(packed: PackedFormat | None) -> str:
    return "text" if packed is None else f"packed rows ({json.dumps(packed.to_plain())})"


def _sample(storage: Storage, item: _Indexed, columns: Columns, skip: bool) -> tuple[list[str], int]:
    """The first documents of a file's first row group with rows, cut at the limits of the sample.

    Returns:
        The texts, nulls left out, and the number of rows, nulls included.
    """
    texts: list[str] = []
    left, rows = _SAMPLE_BYTES, 0
    arrays = read_documents(
        storage,
        item.entry.path,
        item.row_groups[0],
        columns,
        item.entry.content,
        batch_rows=16,
        request_bytes=_SAMPLE_REQUEST_BYTES,
        skip=skip,
    )
    for array in documents(arrays):
        for text in array.to_pylist():
            rows += 1
            if text is None:
                continue
            data = text.encode()[:left]
            texts.append(data.decode(errors="ignore"))
            left -= len(data)
            if not left or len(texts) == _SAMPLE_DOCUMENTS:
                return texts, rows
    return texts, rows


def _tokens_per_mib(samples: list[list[str]], encode: Encode) -> int | None:
    """Tokens in a MiB of sampled text, rounded, at least 1; None where there is no text."""
    num_bytes = sum(len(text.encode()) for texts in samples for text in texts)
    if not num_bytes:
        return None
    num_tokens = sum(len(encode(texts)[0]) for texts in samples if texts)
    return max(1, ((num_tokens << 20) + num_bytes // 2) // num_bytes)


def _groups(indexed: list[_Indexed]) -> Iterator[_Indexed]:
    """Each row group that is read, as if in a file of its own: in a sorted file a filter's rows may lie anywhere."""
    for item in indexed:
        for number, rows, size in zip(item.row_groups, item.rows, item.text_bytes, strict=True):
            if size:
                yield item._replace(row_groups=[number], rows=[rows], text_bytes=[size])


def _sample_rows(
    storage: Storage, item: _Indexed, columns: Columns, skip: bool, encode_rows: EncodeRows
) -> tuple[int, int]:
    """Tokens of a file's first row group with rows, as its first documents promise, and its bytes.

    Where a filter leaves few rows, more are looked at.
    """
    path, group, (size_bytes, footer_hash) = item.entry.path, item.row_groups[0], item.entry.content
    num_rows, num_bytes = item.rows[0], item.text_bytes[0]
    most = max(_SAMPLE_DOCUMENTS, min(_MOST_ROWS, _MOST_BYTES * num_rows // max(1, num_bytes)))
    unit = UnitSpec(0, 0, path, group, size_bytes, footer_hash)
    rows = tokens = size = left_out = 0
    options = {"batch_rows": 16, "request_bytes": _SAMPLE_REQUEST_BYTES}
    for array in read_documents(storage, path, group, columns, item.entry.content, skip=skip, **options):
        if isinstance(array, Bad | Filtered):
            rows += array.num_rows
            left_out += array.num_rows if isinstance(array, Filtered) else 0
        else:
            parts = encoded(array, unit, rows, encode_rows, skip)
            tokens += sum(len(part[0]) for part in parts if not isinstance(part, Bad))
            rows, size = rows + len(array), size + next(documents([array])).nbytes
        if size >= _SAMPLE_BYTES or rows - left_out >= _SAMPLE_DOCUMENTS or rows >= most:
            break
    return tokens * num_rows // max(1, rows), num_bytes


def _ratio(samples: Iterable[tuple[int, int]]) -> int | None:
    """Tokens in a MiB of sampled row groups, rounded, at least 1; None where there are no tokens."""
    tokens, size = (sum(values) for values in zip(*samples, strict=True))
    return max(1, ((tokens << 20) + size // 2) // max(1, size)) if tokens else None
