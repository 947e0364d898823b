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
import logging
import os
import pickle
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ingest.config import IngestConfig, ResourcesConfig
from ingest.errors import IngestError, ResourceError
from ingest.plan import Cursors
from ingest.run import Maker, Run
from ingest.slab import Slab
from ingest.spec import WindowSpec

LEG_WINDOWS = 512  # 0.7 s of planning; 4 billion tokens at the default window
CALLS_PER_ACTOR = 2  # one window is tokenized while the next one's bytes arrive and the last one's slabs leave
CONNECT_S = 10.0
SETTLE_S = 20.0  # time for the CPUs of a stream that was just closed to come free


def ensure_ray(config: IngestConfig, extra_cpus: float = 0.0) -> None:
    """Joins the Ray cluster there is, or starts a local one with as many logical CPUs as the job needs.

    ``RAY_ADDRESS`` names the cluster; ``local`` starts one even where another runs on this machine.

    Args:
        config: its ``resources`` say what tokenization needs.
        extra_cpus: logical CPUs that others need at the same time (trainers).

    Raises:
        ResourceError: ``RAY_ADDRESS`` names a cluster that cannot be reached.
    """
    if ray.is_initialized():
        return
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False}
    address = os.environ.get("RAY_ADDRESS")
    if address and address not in ("local", "auto"):
        _require_listener(address)
    if address != "local":
        with contextlib.suppress(ConnectionError):
            ray.init(address=address or "auto", **quiet)
            return
        if address:
            raise ResourceError(
                f"RAY_ADDRESS must name a running cluster; got {address}: start it, or unset RAY_ADDRESS"
            )
    need = config.resources.min_actors * config.resources.cpus_per_actor + extra_cpus
    cpus = max(os.cpu_count() or 1, int(-(-need // 1)))
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)


def _require_listener(address: str) -> None:
    """Refuses an address that nobody listens at; Ray itself would try for a quarter of an hour."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ResourceError(
            f"RAY_ADDRESS must name a running cluster; got {address}, {error}: start it, or unset RAY_ADDRESS"
        ) from None


def require_resources(resources: ResourcesConfig, extra_cpus: float = 0.0) -> None:
    """Compares what the job needs with what the cluster has, so that it cannot wait for ever.

    Args:
        resources: the tokenization pool.
        extra_cpus: logical CPUs that trainers will take beside it and do not hold yet.

    Raises:
        ResourceError: the demand does not fit; with the numbers and the smallest change that makes it fit.
    """
    each, fewest = resources.cpus_per_actor, resources.min_actors
    need = fewest * each + extra_cpus
    deadline = time.monotonic() + max(SETTLE_S, resources.cluster_wait_s)
    if resources.cluster_wait_s:
        from ray.autoscaler.sdk import request_resources

        request_resources(bundles=[{"CPU": each}] * fewest)
    while True:
        nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
        total, free = sum(nodes), ray.available_resources().get("CPU", 0.0)
        if free >= need and max(nodes, default=0) >= each:
            return
        impossible = total < need or max(nodes, default=0) < each
        if time.monotonic() > deadline or (impossible and not resources.cluster_wait_s):
            break
        time.sleep(0.1)
    demand = f"{fewest} tokenization actors of {each:g} CPUs" + (
        f" and {extra_cpus:g} for trainers" if extra_cpus else ""
    )
    has = f"{total:g} CPUs in all, {free:g} free, the largest node {max(nodes, default=0):g}"
    room = int((free - extra_cpus) // each)
    step = (
        f"set resources.tokenize_actors to {[room, room]}"
        if room >= 1
        else "add CPUs or lower resources.cpus_per_actor"
    )
    raise ResourceError(
        f"the job must fit the cluster; needs {need:g} CPUs ({demand}), the cluster has {has}: {step}, "
        "start Ray with more num_cpus, or set resources.cluster_wait_s where an autoscaler will add nodes"
    )


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


class _Actor:
    """Makes the windows it is given, one at a time; the next one already reads. One single-threaded tokenizer each."""

    def __init__(self, maker: Maker, world_size: int) -> None:
        self._maker = maker
        self._world_size = world_size
        self._turn = threading.Lock()

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        for spec in block["spec"].to_pylist():
            for slab in self._maker(pickle.loads(spec), self._turn).slabs(self._world_size):  # noqa: S301 - made by _read_task
                yield slab.to_table()


@ray.remote(num_cpus=0, max_restarts=0)
class _Server:
    """Builds the legs of one stream, hands out each rank's iterator, and exits when every rank has left."""

    def __init__(self, run: Run, cursors: Cursors, world_size: int, leg_windows: int) -> None:
        self._run = run
        self._world_size = world_size
        self._leg_windows = leg_windows
        self._specs = run.specs(cursors)
        self._leg = -1
        self._iterators: list[Any] = []
        self._left: set[int] = set()

    def leave(self, rank: int) -> None:
        """Takes note that a rank needs no more."""
        self._left.add(rank)
        if len(self._left) == self._world_size:
            ray.actor.exit_actor()

    def iterator(self, leg: int, rank: int) -> Any:
        """The iterator of one rank over a leg; None behind the last one. Ranks ask for legs in order."""
        if leg > self._leg:
            specs = list(itertools.islice(self._specs, self._leg_windows))
            self._iterators = self._split(specs) if specs else [None] * self._world_size
            self._leg = leg
        return self._iterators[rank]

    def _split(self, specs: list[WindowSpec]) -> list[Any]:
        resources = self._run.config.resources
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        context.target_max_block_size = 1
        context.execution_options.preserve_order = True
        cpus: dict[str, Any] = {"num_cpus": resources.cpus_per_actor}  # the same for both, or Ray does not fuse them
        dataset = ray.data.read_datasource(_WindowSource(specs), override_num_blocks=len(specs), **cpus)
        slabs = dataset.map_batches(
            _Actor,
            fn_constructor_args=(self._run.maker, self._world_size),
            batch_size=None,
            batch_format="pyarrow",
            **cpus,
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
        prefetch_windows: slabs that Ray fetches ahead for a rank.
    """

    def __init__(self, server: Any, name: str, prefetch_windows: int) -> None:
        self._server = server
        self.name = name
        self._prefetch_windows = prefetch_windows

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
        name = f"ingest-stream-{uuid.uuid4().hex}"
        here: Any = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        server: Any = _Server.options(  # type: ignore[attr-defined]
            name=name, scheduling_strategy=here
        ).remote(run, cursors, world_size, leg_windows)
        return cls(server, name, run.config.resources.prefetch_windows)

    @classmethod
    def join(cls, name: str, prefetch_windows: int) -> Stream:
        """Joins a stream that another process of the same Ray job opened."""
        return cls(ray.get_actor(name), name, prefetch_windows)

    def slabs(self, rank: int) -> Iterator[Slab]:
        """The slabs of one rank, leg after leg.

        Raises:
            IngestError: what failed in an actor, as its own class; ResourceError where Ray itself failed.
        """
        try:
            for leg in itertools.count():
                iterator = ray.get(self._server.iterator.remote(leg, rank))
                if iterator is None:
                    return
                batches = iterator.iter_batches(
                    batch_size=None, batch_format="pyarrow", prefetch_batches=self._prefetch_windows
                )
                yield from map(Slab.from_table, batches)
        except ray.exceptions.RayError as error:
            raise translated(error) from error

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
