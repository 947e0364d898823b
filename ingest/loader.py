"""Slabs to batches on one rank, with the position of the last batch handed out.

A loader is one pass from its position to the end of the stream: breaking off and iterating again goes on where the last
batch left off. One thread pulls slabs ahead, another makes tensors and copies them to the device, both bounded in
number; the position moves only when a batch is handed out. Nothing waits without a limit: after
``resources.stall_timeout_s`` without a slab the loader raises and says which window is missing.
"""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

import torch

from ingest.batch import Batch
from ingest.config import IngestConfig, ResourcesConfig
from ingest.errors import ResourceError, ResumeError
from ingest.lanes import Lanes, Step, steps
from ingest.metrics import Timing
from ingest.position import Position
from ingest.prefetch import Prefetcher
from ingest.readahead import ReadAhead
from ingest.run import Run
from ingest.slab import Slab
from ingest.stall import stacks

_log = logging.getLogger("ingest")

T = TypeVar("T", Step, Batch)


class SlabStream(Protocol):
    """Where a loader gets its slabs: ``pipeline.Stream``, or a stand-in of a test."""

    def slabs(self, rank: int) -> Iterator[Slab]:
        """The slabs of one rank, in order."""
        ...

    def leave(self, rank: int) -> None:
        """Says that the rank takes no more; the stream ends with its last rank."""
        ...

    def standing(self) -> list[str]:
        """What takes long where the slabs are made: a line, and below it where its threads stand."""
        ...


Connect = Callable[[Run, Position], SlabStream]


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
        self._iterating: Generator[Any, None, None] | None = None

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
        self._position = self.run.require(position)

    def __iter__(self) -> Iterator[Batch]:
        prefetcher = Prefetcher(self._device, self.config.resources.prefetch_batches)
        with contextlib.closing(self._begin(prefetcher.batches)) as batches:  # so that leaving the loop frees the CPUs
            for batch in batches:
                if line := self.timing.complaint():
                    _log.warning(line)
                yield batch

    def steps(self) -> Generator[Step, None, None]:
        """Like iterating, with the rows as they travelled and their addresses instead of tensors."""
        return self._begin(lambda ahead: ahead)

    def _begin(self, finish: Callable[[Iterator[Step]], Iterator[T]]) -> Generator[T, None, None]:
        self.close()
        iterating = self._handed_out(finish)
        self._iterating = iterating
        return iterating

    def _handed_out(self, finish: Callable[[Iterator[Step]], Iterator[T]]) -> Generator[T, None, None]:
        """Opens the stream, and notes the position of each item just before the consumer gets it."""
        began = time.perf_counter()
        self.timing = Timing()
        try:
            with contextlib.closing(self._feed()) as feed:
                eos_id, total_tokens = self.run.tokenizer.eos_id, self.config.total_tokens
                slabs, check = map(self._noted, feed), self.run.check
                items = finish(steps(slabs, self._position, self._lanes, eos_id, total_tokens, check))
                with contextlib.closing(cast("Generator[T, None, None]", items)):
                    while (item := self._timed(items, began)) is not None:
                        self._position = item.position
                        yield item
        finally:
            self._iterating = None

    def _feed(self) -> Feed:
        stream, rank, resources = self._connect(self.run, self._position), self._lanes.rank, self.config.resources

        def stalled(last: Slab | None) -> ResourceError:
            after = "none yet" if last is None else f"that of window {last.window}"
            limit = f"{resources.stall_timeout_s:g} s"
            makers = (
                "; ".join(each.splitlines()[0] for each in stream.standing()) or "no actor has said what it waits for"
            )
            return ResourceError(
                f"rank {rank} must get a slab within resources.stall_timeout_s; got none for {limit}, the last was "
                f"{after}; {makers}: let all ranks iterate at the same time, see the stacks in the log, or raise the "
                "limit"
            )

        return Feed(stream, rank, resources, stalled)

    def _noted(self, slab: Slab) -> Slab:
        self.timing.note(int(slab.prefix.tokens_O[-1]), slab.spent)
        return slab

    def _timed(self, items: Iterator[T], began: float) -> T | None:
        asked = time.perf_counter()
        item = next(items, None)
        now, timing = time.perf_counter(), self.timing
        if item is not None and not timing.first_batch_s:
            timing.first_batch_s = now - began
        else:
            timing.wait_s += now - asked
            timing.elapsed_s = now - began - timing.first_batch_s
        return item

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
    # Ray is imported where it is used first. In a notebook without ipywidgets the import says twice that they are
    # missing, though nothing here uses them.
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")
        from ingest.cluster import ensure_ray
    from ingest.pipeline import Stream

    ensure_ray(run.config)
    return Stream.open(run, position.cursors, world_size=1)


class Feed(ReadAhead[Slab]):
    """A rank's slabs, at most ``resources.prefetch_windows`` ahead; leaves the stream when closed."""

    def __init__(
        self,
        stream: SlabStream,
        rank: int,
        resources: ResourcesConfig,
        stalled: Callable[[Slab | None], ResourceError],
    ) -> None:
        self._stream, self._rank = stream, rank
        name = f"ingest-rank-{rank}"
        limit_s = resources.stall_timeout_s
        super().__init__(stream.slabs(rank), resources.prefetch_windows, name, limit_s, stalled, self._where)

    def _where(self) -> str:
        return "\n".join([stacks(), *self._stream.standing()])

    def close(self) -> None:
        """Leaves the stream and ends the thread: whoever shuts Ray down next must not find it in a call."""
        super().close()
        self._stream.leave(self._rank)
        self.join()
