"""What the same cores do without the pipeline: a bare loop over the tokenizer, and a bare read of the Parquet files.

The bare loop is as lean as can be: as many single-threaded processes as the pipeline has actors, texts in memory
before the clock starts, nothing done with the ids. A pipeline that reads, packs, shuffles, hashes and ships as well can
only come near it. Both are timed for ``SECONDS`` so that the figures are rates, not totals.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from ingest.columns import documents, texts
from ingest.parquet import read_documents
from ingest.run import Run
from ingest.tokenizer import Tokenizer

SECONDS = 10.0
START_S = 120.0  # for the processes to import and build the tokenizer
TEXT_BYTES = 32 << 20  # text that the loop goes over again and again
BATCH_BYTES = 1 << 20


def ceiling(run: Run, tokens_per_s: float) -> dict[str, Any]:
    """The figures that ``ingest stream --ceiling`` adds.

    Args:
        run: the prepared run; its files are read.
        tokens_per_s: what the pipeline reached on them.

    Returns:
        ``bare_processes``, ``bare_tokens_per_s``, ``ceiling_share`` (pipeline over bare loop) and ``read_bytes_per_s``
        (bytes a second that one process reads from Parquet with nothing behind it). Where all sources are packed, the
        bare loop is one process that reads the same row groups and copies the tokens once.
    """
    if all(source.packed for source in run.manifest.sources):
        processes, (bare, read_rate) = 1, _read_packed(run)
    else:
        batches, read_rate = _read(run)
        processes = min(run.config.resources.max_actors, os.cpu_count() or 1)
        bare = _bare(run.tokenizer, batches, processes)
    return {
        "bare_processes": processes,
        "bare_tokens_per_s": bare,
        "ceiling_share": tokens_per_s / bare,
        "read_bytes_per_s": read_rate,
    }


def _read_packed(run: Run) -> tuple[float, float]:
    """Tokens and bytes a second of reading and copying the row groups in plan order, again and again."""
    tokens, size, began, elapsed = 0, 0, time.perf_counter(), 0.0
    for planned in cycle(run.plan.windows(run.plan.start())):
        for unit in planned.units:
            info = run.manifest.sources[unit.source].unit(unit.number)
            file = pq.ParquetFile(run.storage.open(info.path))
            for chunk in file.read_row_group(info.row_group, columns=["tokens"])["tokens"].chunks:
                size += np.frombuffer(chunk.buffers()[1], np.uint8).copy().nbytes
            tokens += info.rows * run.config.packing.sequence_length
        elapsed = time.perf_counter() - began
        if elapsed >= SECONDS:
            break
    return tokens / elapsed, size / elapsed


def _read(run: Run) -> tuple[list[list[str]], float]:
    """Batches of text in plan order, and the text bytes a second that reading them took."""
    batches: list[list[str]] = [[]]
    room, size, spent = BATCH_BYTES, 0, 0.0
    for planned in run.plan.windows(run.plan.start()):
        for unit in planned.units:
            if run.manifest.sources[unit.source].packed:
                continue
            info = run.manifest.sources[unit.source].unit(unit.number)
            columns = run.config.sources[unit.source].columns
            began = time.perf_counter()
            read = read_documents(run.storage, info.path, info.row_group, columns, skip=True)
            arrays = list(documents(read))
            spent += time.perf_counter() - began
            size += sum(array.nbytes for array in arrays)
            for text in (text for array in arrays for text in texts(array)):
                room -= len(text)
                batches[-1].append(text)
                if room <= 0:
                    batches.append([])
                    room = BATCH_BYTES
            if size >= TEXT_BYTES:
                return [batch for batch in batches if batch], size / spent
    return [batch for batch in batches if batch], size / spent


def _bare(tokenizer: Tokenizer, batches: list[list[str]], processes: int) -> float:
    """Tokens a second of all processes together, one eos a document counted as the pipeline counts it."""
    context = multiprocessing.get_context("spawn")
    ready, counts = context.Barrier(processes, timeout=START_S), context.Queue()
    workers = [
        context.Process(target=_loop, args=(tokenizer, batches[index:] + batches[:index], ready, counts), daemon=True)
        for index in range(processes)
    ]
    for worker in workers:
        worker.start()
    rates = [counts.get(timeout=START_S + 2 * SECONDS) for _ in workers]
    for worker in workers:
        worker.join()
    return float(sum(rates))


def _loop(tokenizer: Tokenizer, batches: Sequence[list[str]], ready: Any, counts: Any) -> None:
    encode: Callable[[list[str]], int] = tokenizer.bare_loop()
    encode(batches[0])
    ready.wait()
    tokens, began, elapsed = 0, time.perf_counter(), 0.0
    for batch in cycle(batches):
        tokens += encode(batch)
        elapsed = time.perf_counter() - began
        if elapsed >= SECONDS:
            break
    counts.put(tokens / elapsed)
