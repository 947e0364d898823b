"""Draining the loader with no model: the pipeline's ceiling, and the proof that its order does not depend on the ranks.

All ranks run in this process, one thread each, over one stream. The digest of a step is recomputed from the rows that
the ranks really got, summed over the ranks, and compared with what the position says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from queue import Queue
from typing import Any

from ingest.errors import OrderError
from ingest.lanes import require_world_size, step_digest
from ingest.loader import Loader, SlabStream
from ingest.position import Position
from ingest.run import Run

PROGRESS_S = 2.0
Record = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class _Part:
    """What one rank got in one step."""

    digest: int
    position: Position


class _Together:
    """Opens one stream for all ranks of this process, when the first of them connects."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._lock = threading.Lock()
        self._stream: SlabStream | None = None

    def __call__(self, run: Run, position: Position) -> SlabStream:
        from ingest.pipeline import Stream

        with self._lock:
            if self._stream is None:
                self._stream = Stream.open(run, position.cursors, self._world_size)
            return self._stream


def drain(
    run: Run,
    world_size: int = 1,
    *,
    position: Position | None = None,
    steps: int | None = None,
    record: Record = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], Position]:
    """Hands out every step to every rank and throws it away.

    Args:
        run: the prepared run.
        world_size: ranks.
        position: where to go on; None is the start.
        steps: stop after so many; None goes on to the end.
        record: called with ``step, rows, tokens, digest`` of each global batch, in order.
        progress: called with one line about every two seconds.

    Returns:
        The figures that ``ingest stream`` prints, and the position after the last step.

    Raises:
        ConfigError: the world size does not divide the lanes.
        OrderError: the ranks' rows are not those that the position promises.
    """
    from ingest.cluster import ensure_ray

    require_world_size(world_size, run.config.lanes)
    if position is not None:
        position = run.require(position)
    ensure_ray(run.config)
    connect, cpu_began = _Together(world_size), time.process_time()
    loaders = [
        Loader(run.config, rank=rank, world_size=world_size, run=run, connect=connect) for rank in range(world_size)
    ]
    parts: list[Queue[_Part | BaseException | None]] = [Queue(8) for _ in loaders]
    start = position or run.start()
    threads = [
        threading.Thread(target=_consume, args=(loader, start, steps, queue), daemon=True)
        for loader, queue in zip(loaders, parts, strict=True)
    ]
    for thread in threads:
        thread.start()
    end = _collect(parts, start, record, _Progress(progress))
    for thread in threads:
        thread.join(timeout=30)
    return _figures(run, loaders, start, end, time.process_time() - cpu_began), end


def _consume(loader: Loader, start: Position, steps: int | None, parts: Queue[_Part | BaseException | None]) -> None:
    try:
        loader.load_state_dict(start.to_dict())
        with loader:
            for step in islice(loader.steps(), steps):
                parts.put(_Part(step_digest(step), step.position))
        parts.put(None)
    except BaseException as error:  # raised again by _collect
        parts.put(error)


def _collect(
    parts: list[Queue[_Part | BaseException | None]], start: Position, record: Record, say: Callable[[Position], None]
) -> Position:
    """Joins the ranks' parts step by step."""
    last = start
    while True:
        step = [queue.get() for queue in parts]
        for part in step:
            if isinstance(part, BaseException):
                raise part
        got = [part for part in step if isinstance(part, _Part)]
        if not got:
            return last
        places = {(part.position.step, part.position.digest) for part in got}
        if len(got) < len(step) or len(places) > 1:
            raise OrderError(
                f"all ranks must agree after step {last.step}; got {sorted(places)} of {len(step)} ranks: report it"
            )
        now = got[0].position
        digest = (now.counts.digest - last.counts.digest) % 2**64
        if sum(part.digest for part in got) % 2**64 != digest:
            raise OrderError(f"the rows of step {last.step} must be those of the position; got others: report it")
        tokens = now.tokens - last.tokens
        record({"step": now.step, "rows": now.rows - last.rows, "tokens": tokens, "digest": format(digest, "016x")})
        say(now)
        last = now


class _Progress:
    """Says where the stream is, about every two seconds."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._began = time.perf_counter()
        self._due_s = 0.0

    def __call__(self, now: Position) -> None:
        elapsed = time.perf_counter() - self._began
        if elapsed >= self._due_s:
            self._due_s = elapsed + PROGRESS_S
            self._say(f"step {now.step}: {now.tokens:,} tokens, window {now.window}, {elapsed:.0f} s")


def describe_account(run: Run, end: Position) -> dict[str, Any]:
    """What became of every row since the run began, by source, and the first skips in words.

    Rows ``read`` are ``documents``, ``empty`` and ``bad`` ones, and all ``tokens`` made of them are ``trained_tokens``
    at a window's end. Inside a window, whose account is booked at its end, trained tokens are ahead.
    """
    names, account = [source.name for source in run.config.sources], end.counts.account
    by_name = account.to_plain(names)["sources"]
    trained = zip(names, end.counts.source_tokens, strict=True)
    return {
        "sources": [{"name": name, **by_name[name], "trained_tokens": tokens} for name, tokens in trained],
        "skipped_files": account.skipped_files,
        "skips": [f"{names[skip.source]}: {skip}" for skip in account.skips],
        "accepted": [str(change) for change in end.accepted],
    }


def _figures(run: Run, loaders: list[Loader], start: Position, end: Position, cpu_s: float) -> dict[str, Any]:
    timing = loaders[0].timing
    num_steps, tokens = end.step - start.step, end.tokens - start.tokens
    slots = (end.rows - start.rows) * run.config.packing.sequence_length
    steady_tokens = tokens * (num_steps - 1) / num_steps if num_steps else 0
    return {
        "steps": num_steps,
        "rows": end.rows - start.rows,
        "tokens": tokens,
        "tokens_per_s": steady_tokens / timing.elapsed_s if timing.elapsed_s else 0.0,
        "first_batch_s": timing.first_batch_s,
        "wait_share": timing.wait_share,
        "actors_share": timing.stage_shares,
        "cpu_s_per_million_tokens": {
            "actors": timing.cpu_s_per_million_tokens,
            "this_process": cpu_s / tokens * 1e6 if tokens else 0.0,
        },
        "storage": timing.traffic,
        "padding_share": 1 - tokens / slots if slots else 0.0,
        "documents": end.counts.documents - start.counts.documents,
        "documents_cut": end.counts.documents_cut - start.counts.documents_cut,
        "skipped_documents": end.counts.skipped - start.counts.skipped,
        **describe_account(run, end),
        "backend": run.tokenizer.backend_name,
        "position_step": end.step,
        "digest": end.digest,
    }
