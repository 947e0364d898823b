"""What ``ingest pack`` does: the rows of a run, written as packed Parquet that a run's sources can name.

The run is made with one lane and one row a step. Then every step is one row, in the order in which a window hands them
out, and the difference of two positions says what the row holds. It also packs tightest: no row is padded for a lane.

Guarantees: a file appears whole or not at all, in object stores too; a directory that holds Parquet is refused before
anything starts; ``_packed.json``, which names that begin with ``_`` keep out of the sources, is written last, so where
it is missing the files are not all there.

Cost: one file in memory, twice while it is sent (128 MB at uint16), and about 50 µs a row: 40 million tokens/s at
T = 2048. Rejected: taking the lanes of the run, whose slabs say what a row of lanes holds but not each row.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ingest.errors import ConfigError, DataError, StorageError
from ingest.lanes import Step
from ingest.packed import HASHES_KEY, SUMMARY, PackedFormat, PackedRows
from ingest.run import Run
from ingest.slab import Rows
from ingest.storage import Storage

GROUP_TOKENS = 1 << 20
FILE_TOKENS = 32 << 20
PROGRESS_S = 2.0


def packing_run(run: Run) -> Run:
    """The run whose steps are the rows to write: one lane, one row a step, all else as in ``run``."""
    return replace(run, config=replace(run.config, lanes=1, global_batch_rows=1))


def pack(
    steps: Iterable[Step],
    form: PackedFormat,
    storage: Storage,
    out: str,
    *,
    lanes: int,
    group_tokens: int = GROUP_TOKENS,
    file_tokens: int = FILE_TOKENS,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Writes rows to ``packed-00000.parquet`` and so on.

    Args:
        steps: of ``packing_run``, from the start, as from ``Loader.steps``.
        form: what the files say of themselves.
        storage: where they go.
        out: a directory or URI without Parquet files.
        lanes: of the run that will read them; row groups hold a multiple of so many rows.
        group_tokens: size of a row group, about.
        file_tokens: size of a file, about.
        progress: called with one line about every two seconds.

    Returns:
        The figures that ``ingest pack`` prints; ``tokens_per_s`` counts from the first row on.

    Raises:
        ConfigError: ``out`` holds Parquet files.
        DataError: there is nothing to write.
        StorageError: a file cannot be written.
    """
    _require_no_parquet(storage, out)
    row_of_lanes = lanes * form.sequence_length
    group_rows = lanes * max(1, round(group_tokens / row_of_lanes))
    writer = _Writer(form, storage, out, group_rows, max(1, round(file_tokens / (group_rows * form.sequence_length))))
    counts, cut, digest, began, due_s = (0, 0), 0, "", 0.0, 0.0
    for step in steps:
        assert len(step.rows) == 1, "a step of packing_run is one row"
        now = time.perf_counter()
        began = began or now
        position = step.position
        before, counts = counts, (position.tokens, position.counts.documents)
        cut, digest = position.counts.documents_cut, position.digest
        if step.rows.counts_B[0]:
            writer.add(step.rows, counts[0] - before[0], counts[1] - before[1])
        if now - began >= due_s:
            due_s = now - began + PROGRESS_S
            progress(f"{counts[0]:,} tokens in {writer.rows:,} rows, {writer.files} files, {now - began:.0f} s")
    writer.end()
    if not writer.rows:
        raise DataError("the sources of a pack must hold text; got no document with any: check their paths")
    figures = {
        "files": writer.files,
        "rows": writer.rows,
        "tokens": counts[0],
        "documents": counts[1],
        "documents_cut": cut,
        "bytes": writer.bytes,
        "tokens_per_s": counts[0] / (time.perf_counter() - began),
        "padding_share": 1 - counts[0] / (writer.rows * form.sequence_length),
        "digest": digest,
    }
    storage.write_bytes(f"{out}/{SUMMARY}", json.dumps({**form.to_plain(), **figures}, indent=1).encode())
    return figures


def _require_no_parquet(storage: Storage, out: str) -> None:
    found = storage.info(_path(out, 0))  # whatever hinders the look is raised; the listing may just find no directory
    listed = [found.path] if found else []
    if not listed:
        with contextlib.suppress(StorageError):
            listed = [file.path for file in storage.find_parquet([out])]
    if listed:
        raise ConfigError(f"OUT must hold no Parquet files; {out} holds {listed[0]}: name another directory")


def _path(out: str, number: int) -> str:
    return f"{out}/packed-{number:05}.parquet"


class _Writer:
    """Gathers rows to row groups, and row groups to files.

    Args:
        form: of the files.
        storage: where they go.
        out: the directory.
        group_rows: rows of a row group; the last one of all may have fewer.
        file_groups: row groups of a file, at most.
    """

    def __init__(self, form: PackedFormat, storage: Storage, out: str, group_rows: int, file_groups: int) -> None:
        self._schema = form.schema
        self._storage, self._out = storage, out
        self._group_rows, self._file_groups = group_rows, file_groups
        self._group: list[Rows] = []
        self._counts: list[tuple[int, int]] = []
        self._groups: list[PackedRows] = []
        self.files = self.rows = self.bytes = 0

    def add(self, row: Rows, input_tokens: int, documents: int) -> None:
        """Takes one row."""
        self._group.append(row)
        self._counts.append((input_tokens, documents))
        self.rows += 1
        if len(self._group) == self._group_rows:
            self._end_group()
            if len(self._groups) == self._file_groups:
                self._end_file()

    def end(self) -> None:
        """Writes what is left."""
        if self._group:
            self._end_group()
        if self._groups:
            self._end_file()

    def _end_group(self) -> None:
        counts = np.array(self._counts, np.int32)
        self._groups.append(PackedRows(Rows.concatenate(self._group), counts[:, 0], counts[:, 1]))
        self._group, self._counts = [], []

    def _end_file(self) -> None:
        sink = pa.BufferOutputStream()
        options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        with pq.ParquetWriter(sink, self._schema, **options) as writer:
            for group in self._groups:
                writer.write_table(group.to_table(self._schema), row_group_size=len(group.rows))
            writer.add_key_value_metadata({HASHES_KEY: json.dumps([group.hash() for group in self._groups])})
        data = sink.getvalue().to_pybytes()
        self._storage.write_bytes(_path(self._out, self.files), data)
        self.files += 1
        self.bytes += len(data)
        self._groups = []
