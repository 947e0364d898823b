"""Slabs to batches on one rank, with the position of the last batch handed out.

A loader is one pass from its position to the end of the stream: breaking off and iterating again goes on where the last
batch left off. A feeder thread pulls slabs ahead, bounded in number; steps are cut and tensors made on the consumer's
thread. Nothing waits without a limit: after ``resources.stall_timeout_s`` without a slab the loader raises and says
which window is missing.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch

from ingest.batch import Batch
from ingest.config import IngestConfig
from ingest.errors import ResourceError, ResumeError
from ingest.lanes import Lanes, Step, steps
from ingest.position import Position
from ingest.run import Run
from ingest.slab import Slab

_log = logging.getLogger("ingest")
_WARN_S = 60.0


class SlabStream(Protocol):
    """Where a loader gets its slabs: ``pipeline.Stream``, or a stand-in of a test."""

    def slabs(self, rank: int) -> Iterator[Slab]:
        """The slabs of one rank, in order."""
        ...

    def leave(self, rank: int) -> None:
        """Says that the rank takes no more; the stream ends with its last rank."""
        ...


Connect = Callable[[Run, Position], SlabStream]


@dataclass
class Timing:
    """What a loader measured since its iteration began, in seconds.

    Args:
        first_batch_s: from the start of iteration to the first batch.
        wait_s: time the consumer stood waiting for a slab after the first batch.
        elapsed_s: from the first batch to now.
    """

    first_batch_s: float = 0.0
    wait_s: float = 0.0
    elapsed_s: float = 0.0

    @property
    def wait_share(self) -> float:
        """Share of the time after the first batch spent waiting for data, 0 to 1."""
        return self.wait_s / self.elapsed_s if self.elapsed_s else 0.0


class Loader:
    """The batches of one rank.

    Args:
        config: the run.
        rank: 0 to ``world_size`` - 1.
        world_size: a divisor of ``config.lanes``.
        device: where the tensors go; None is the CPU.
        run: a prepared run to share between loaders; None prepares ``config``.
        connect: opens or joins the stream when iteration begins; None starts one of this process's own, and a local
            Ray if there is none.

    Raises:
        ConfigError, StorageError, DataError: the run cannot be prepared, or the rank does not fit.
    """

    def __init__(
        self,
        config: IngestConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str | None = None,
        run: Run | None = None,
        connect: Connect | None = None,
    ) -> None:
        self._lanes = Lanes(config.lanes, config.global_batch_rows, rank, world_size)
        self.config = config
        self.run = run or Run.prepare(config)
        self.timing = Timing()
        self._device = None if device is None else torch.device(device)
        self._connect = connect or _own_stream
        self._position = self.run.start()
        self._iterating: Generator[Step, None, None] | None = None

    @property
    def position(self) -> Position:
        """After the last batch handed out; the same on every rank at the same step."""
        return self._position

    def state_dict(self) -> dict[str, Any]:
        """The position as plain values, under 16 KiB for ten sources.

        With ``load_state_dict`` it makes the loader ``Stateful`` in the sense of torch.distributed.checkpoint.
        """
        return self._position.to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where ``state`` was taken; call it before iterating.

        Raises:
            ResumeError: the state is no position, or one of other data or settings, or iteration has begun.
        """
        if self._iterating is not None:
            raise ResumeError("load_state_dict must come before iterating; got an open iteration: close() first")
        position = Position.from_dict(state)
        self.run.require(position)
        self._position = position

    def __iter__(self) -> Iterator[Batch]:
        with contextlib.closing(self.steps()) as iterating:  # so that leaving the loop frees the CPUs
            for step in iterating:
                yield Batch.from_rows(step.rows, step.position, self._device)

    def steps(self) -> Generator[Step, None, None]:
        """Like iterating, with the rows as they travelled and their addresses instead of tensors."""
        self.close()
        self._iterating = self._steps()
        return self._iterating

    def _steps(self) -> Generator[Step, None, None]:
        try:
            yield from self._streamed()
        finally:
            self._iterating = None

    def _streamed(self) -> Generator[Step, None, None]:
        began = time.perf_counter()
        self.timing = Timing()
        stream = self._connect(self.run, self._position)
        feed = _Feed(stream, self._lanes, self.config, self.timing)
        try:
            eos_id = self.run.tokenizer.eos_id
            for step in steps(feed, self._position, self._lanes, eos_id, self.config.total_tokens):
                self._time(began)
                self._position = step.position
                yield step
        finally:
            feed.close()
            stream.leave(self._lanes.rank)

    def _time(self, began: float) -> None:
        elapsed = time.perf_counter() - began
        if not self.timing.first_batch_s:
            self.timing.first_batch_s, self.timing.wait_s = elapsed, 0.0
        self.timing.elapsed_s = elapsed - self.timing.first_batch_s

    def close(self) -> None:
        """Ends the iteration, if there is one, and frees its CPUs; the position stays. Safe to call twice."""
        iterating, self._iterating = self._iterating, None
        if iterating is not None:
            iterating.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _own_stream(run: Run, position: Position) -> SlabStream:
    from ingest.pipeline import Stream, ensure_ray  # Ray is imported where it is used first

    ensure_ray(run.config)
    return Stream.open(run, position.cursors, world_size=1)


class _Feed:
    """Slabs pulled ahead by a thread, at most ``resources.prefetch_slabs`` beyond those that make a window."""

    def __init__(self, stream: SlabStream, lanes: Lanes, config: IngestConfig, timing: Timing) -> None:
        self._timing = timing
        self._limit_s = config.resources.stall_timeout_s
        self._rank = lanes.rank
        self._queue: queue.Queue[Slab | BaseException | None] = queue.Queue(config.resources.prefetch_slabs)
        self._closed = threading.Event()
        self._after = "none yet"
        self._thread = threading.Thread(
            target=self._fill, args=(stream,), name=f"ingest-rank-{lanes.rank}", daemon=True
        )
        self._thread.start()

    def _fill(self, stream: SlabStream) -> None:
        try:
            for slab in stream.slabs(self._rank):
                if not self._put(slab):
                    return
            self._put(None)
        except BaseException as error:  # raised again by __next__, on the consumer's thread
            self._put(error)

    def _put(self, item: Slab | BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def __iter__(self) -> Iterator[Slab]:
        return self

    def __next__(self) -> Slab:
        began = time.perf_counter()
        item = self._get()
        self._timing.wait_s += time.perf_counter() - began
        if item is None:
            raise StopIteration
        if isinstance(item, BaseException):
            raise item
        self._after = f"window {item.window} lane {item.lane}"
        return item

    def _get(self) -> Slab | BaseException | None:
        waited = 0.0
        while waited < self._limit_s:
            pause = min(_WARN_S, self._limit_s - waited)
            try:
                return self._queue.get(timeout=pause)
            except queue.Empty:
                waited += pause
                _log.warning("rank %d has waited %.0f s for a slab; the last was %s", self._rank, waited, self._after)
        raise ResourceError(
            f"rank {self._rank} must get a slab within resources.stall_timeout_s; got none for {self._limit_s:g} s, "
            f"the last was {self._after}: let all ranks iterate at the same time, see the Ray logs, or raise the limit"
        )

    def close(self) -> None:
        self._closed.set()
