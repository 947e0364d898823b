"""The only owner of ray.data: windows through an actor pool to one slab stream a rank.

    server actor ── builds ──> Dataset of a leg: one read task a window ─> actor pool: window -> N slabs ─>
    streaming_split

A leg is the run of windows that one Ray Data execution covers: a read task costs about 1.3 ms to plan, and that delays
the first batch. A server actor, owned by the process that opened the stream, builds each leg when its first rank asks
and hands out the rank's iterator; ending that one actor ends the whole stream and frees its CPUs.

The order rests on these facts, which ``lanes.py`` checks slab by slab: read tasks run in plan order with
``preserve_order``; ``override_num_blocks`` equal to the number of tasks keeps a window in one piece;
``target_max_block_size`` of 1 byte makes every slab a block of one row; the splitter hands each block to the rank with
the fewest rows so far, so that slab k of a window goes to rank k. Found in Ray 2.60, see DESIGN.md.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ingest.actor import MAX_DEATHS, Actor
from ingest.cluster import require_memory, require_resources
from ingest.errors import IngestError, ResourceError
from ingest.plan import Cursors
from ingest.readahead import ReadAhead
from ingest.run import Run
from ingest.slab import Slab
from ingest.spec import WindowSpec
from ingest.stall import WARN_S

EARLY_WINDOWS = 16  # before the end of a leg the next one starts: actors take seconds, where CPUs are free for them
LEG_WINDOWS = 512  # 0.7 s of planning; 4 billion tokens at the default window
ANSWER_S = 10.0  # for the server to say what stands still
CALLS_PER_ACTOR = 2  # one window is tokenized while the next one's bytes arrive and the last one's slabs leave


class _WindowSource(Datasource):
    """One read task a window, in plan order; the bytes are read by the actor that the task is fused with."""

    def __init__(self, specs: list[WindowSpec]) -> None:
        self._specs = specs

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        del parallelism, per_task_row_limit, data_context  # the plan alone decides
        return [_read_task(pickle.dumps(spec)) for spec in self._specs]


def _read_task(spec: bytes) -> ReadTask:
    def read() -> Iterable[pa.Table]:
        return [pa.table({"spec": pa.array([spec], pa.binary())})]

    metadata = BlockMetadata(num_rows=1, size_bytes=len(spec), input_files=None, exec_stats=None, task_exec_stats=None)
    return ReadTask(read, metadata)


@ray.remote(num_cpus=0, max_restarts=0)
class _Server:
    """Builds the legs of one stream, hands out each rank's iterator, and exits when every rank has left."""

    def __init__(self, run: Run, cursors: Cursors, world_size: int, leg_windows: int, name: str) -> None:
        self._run = run
        self._name = name
        self._again: Counter[int] = Counter()
        self._files: dict[int, list[str]] = {}
        self._world_size = world_size
        self._leg_windows = leg_windows
        self._specs = run.specs(cursors)
        self._leg, self._windows = -1, 0
        self._iterators: list[Any] = []
        self._left: set[int] = set()
        self._warn_s = min(WARN_S, run.config.resources.stall_timeout_s / 3)
        self._noted: dict[int, tuple[float, str]] = {}

    def note(self, window: int, words: str) -> None:
        """Takes note of a window that takes long; said again every ``_warn_s`` until it is made."""
        self._noted[window] = time.monotonic(), words

    def standing(self) -> list[str]:
        """What was noted and still holds, the earliest window first."""
        now = time.monotonic()
        self._noted = {key: note for key, note in self._noted.items() if now < note[0] + 1.5 * self._warn_s}
        return [self._noted[window][1] for window in sorted(self._noted)]

    def again(self, window: int, files: list[str]) -> dict[int, list[str]]:
        """Takes note that an actor makes a window after one was lost; returns those that too many were lost with.

        An actor has two calls, so a window beside the one at fault may be among them.
        """
        self._again[window] += 1
        if self._again[window] >= MAX_DEATHS - 1:  # an actor that was started again says it of each window it makes
            self._files[window] = files
        if self._again[window] < MAX_DEATHS:
            return {}
        return {each: self._files[each] for each, count in self._again.items() if count >= MAX_DEATHS - 1}

    def leave(self, rank: int) -> None:
        """Takes note that a rank needs no more."""
        self._left.add(rank)
        if len(self._left) == self._world_size:
            ray.actor.exit_actor()

    def iterator(self, leg: int, rank: int) -> tuple[Any, int]:
        """The iterator of one rank over a leg, and its windows; 0 behind the last leg. Ranks ask for legs in order."""
        if leg > self._leg:
            specs = list(itertools.islice(self._specs, self._leg_windows))
            self._iterators = self._split(specs) if specs else [None] * self._world_size
            self._leg, self._windows = leg, len(specs)
        return self._iterators[rank], self._windows

    def _split(self, specs: list[WindowSpec]) -> list[Any]:
        resources = self._run.config.resources
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        context.target_max_block_size = 1
        context.memory_usage_poll_interval_s = None  # a thread a call that reads the process's memory map each second
        context.execution_options.preserve_order = True
        # The same for both, or Ray does not fuse them.
        place: dict[str, Any] = {
            "num_cpus": resources.cpus_per_actor,
            "label_selector": resources.label_selector or None,
        }
        dataset = ray.data.read_datasource(_WindowSource(specs), override_num_blocks=len(specs), **place)
        slabs = dataset.map_batches(
            Actor,
            fn_constructor_args=(self._run.maker, self._world_size, self._name, self._warn_s),
            batch_size=None,
            batch_format="pyarrow",
            **place,
            compute=ray.data.ActorPoolStrategy(
                max_concurrent_calls_per_actor=CALLS_PER_ACTOR,
                enable_true_multi_threading=True,
                min_size=min(resources.min_actors, len(specs)),
                max_size=min(resources.max_actors, len(specs)),
            ),
        )
        return list(slabs.streaming_split(self._world_size, equal=False))


class Stream:
    """An open stream, as one process sees it.

    Args:
        server: handle of the server actor; the stream lives as long as the process that opened it holds this.
        name: of that actor in the job's namespace, by which other ranks ``join``.
    """

    def __init__(self, server: Any, name: str) -> None:
        self._server = server
        self.name = name

    @classmethod
    def open(cls, run: Run, cursors: Cursors, world_size: int, *, leg_windows: int = LEG_WINDOWS) -> Stream:
        """Starts the server actor in this process's ownership: when this process ends, so does the stream.

        Args:
            run: the prepared run.
            cursors: the plan before the first window wanted.
            world_size: ranks that will consume it, all of them at the same time.
            leg_windows: windows of one Ray Data execution; it changes no row.

        Raises:
            ResourceError: the cluster lacks the CPUs.
        """
        require_resources(run.config.resources)
        require_memory(run)
        name = f"ingest-stream-{uuid.uuid4().hex}"
        here: Any = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        server: Any = _Server.options(  # type: ignore[attr-defined]
            name=name, scheduling_strategy=here
        ).remote(run, cursors, world_size, leg_windows, name)
        return cls(server, name)

    @classmethod
    def join(cls, name: str) -> Stream:
        """Joins a stream that another process of the same Ray job opened."""
        return cls(ray.get_actor(name), name)

    def slabs(self, rank: int) -> Iterator[Slab]:
        """The slabs of one rank, leg after leg; each leg starts beside the last windows of the one before.

        Raises:
            IngestError: what failed in an actor, as its own class; ResourceError where Ray itself failed.
        """
        legs = (self._leg(number, rank) for number in itertools.count())
        leg: Iterator[tuple[Slab, int]] | None = next(legs)
        first = None
        try:
            while leg is not None:
                following = None
                for slab, windows_left in leg:
                    if following is None and windows_left <= EARLY_WINDOWS:
                        rest = next(legs)
                        first = ReadAhead(itertools.islice(rest, 1), 1, f"ingest-leg-{rank}")
                        following = itertools.chain(first, rest)
                    yield slab
                leg = following
        except ray.exceptions.RayError as error:
            raise translated(error) from error
        finally:
            if first is not None:
                first.close()
                first.join()

    def _leg(self, number: int, rank: int) -> Iterator[tuple[Slab, int]]:
        """The slabs of one rank in one leg, each with the number of those that follow it."""
        iterator, windows = ray.get(self._server.iterator.remote(number, rank))
        if windows:
            # The loader reads ahead. Ray would first fill its own prefetch, and the first slab wait for later ones.
            batches = iterator.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
            for count, batch in enumerate(batches, 1):
                yield Slab.from_table(batch), windows - count

    def standing(self) -> list[str]:
        """What the actors have said of windows that take long; nothing where the server does not answer."""
        with contextlib.suppress(ray.exceptions.RayError):
            return list(ray.get(self._server.standing.remote(), timeout=ANSWER_S))
        return []

    def leave(self, rank: int) -> None:
        """Says that a rank takes no more; with the last one the actors end and their CPUs come free."""
        with contextlib.suppress(ray.exceptions.RayError):
            self._server.leave.remote(rank)


def translated(error: BaseException) -> IngestError:
    """The error of this package that lies behind one of Ray's, or a ResourceError with Ray's own words."""
    words = " ".join(str(error).split())[:600]
    return cause_of(error) or ResourceError(
        f"Ray must deliver the next slab; got {type(error).__name__} {words}: see the Ray logs"
    )


def cause_of(error: BaseException) -> IngestError | None:
    """The error of this package among the causes of another one; None if there is none."""
    seen: list[BaseException] = []
    queue: list[BaseException | None] = [error]
    while queue:
        item = queue.pop()
        if item is None or item in seen:
            continue
        if isinstance(item, IngestError):
            return _bare(item)
        seen.append(item)
        queue += [getattr(item, "cause", None), item.__cause__, item.__context__]
    return None


def _bare(error: IngestError) -> IngestError:
    """The error without Ray's wrapper class, and without the lines that Ray Data adds below its message."""
    cause: Any = getattr(error, "cause", error)
    bare = cause if isinstance(cause, IngestError) else error
    bare.args = (str(bare).splitlines()[0],)
    return bare
