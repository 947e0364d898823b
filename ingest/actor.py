"""What an actor of the pool does: a window in, its slabs out. It imports little, since that delays the first batch.

Guarantees: windows are made one at a time, the earliest first, while the next one's bytes arrive; one that takes long
is reported with the stacks of all threads; one that ends every actor ends the run.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa
import ray

from ingest.errors import DataError
from ingest.maker import Maker
from ingest.metrics import Stopwatch
from ingest.spec import WindowSpec
from ingest.stall import watched
from ingest.turns import Turns
from ingest.window import Window

MAX_DEATHS = 5  # of actors that made one window; Ray would start new ones for ever


class Actor:
    """Makes the windows it is given, one at a time, while the next one already reads; see ``turns.py``.

    The tokenizer is loaded before there is work.

    Args:
        maker: makes windows.
        world_size: slabs of a window.
        server: name of the stream's server actor, which is told of windows that take long and of lost actors.
        warn_s: seconds after which a window takes long.
    """

    def __init__(self, maker: Maker, world_size: int, server: str, warn_s: float) -> None:
        self._maker = maker
        self._server, self._warn_s = server, warn_s
        self._world_size = world_size
        self._turns = Turns()
        self._turns.submit(-1, lambda: maker.tokenizer.encode([""]))
        self._before = self._meters()

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        """Makes the windows of a block [one row each], and yields a table of one row for each slab, in rank order.

        Raises:
            DataError, StorageError: what is read is at fault, or the window has ended too many actors.
        """
        for pickled in block["spec"].to_pylist():
            spec: WindowSpec = pickle.loads(pickled)  # noqa: S301 - made by _read_task
            if ray.get_runtime_context().was_current_actor_reconstructed:
                self._again(spec)
            window, spent = self._make(spec)
            for slab in window.slabs(self._world_size):
                yield replace(slab, spent=spent).to_table()

    def _again(self, spec: WindowSpec) -> None:
        """Ends the run where windows end every actor that makes them, as memory that lacks or a decoder's fault may."""
        files = list(dict.fromkeys(unit.path for unit in spec.units))
        server: Any = ray.get_actor(self._server)
        suspects = ray.get(server.again.remote(spec.cursors.window, files))
        if suspects:
            found = "; ".join(f"window {window} of {_some(files)}" for window, files in sorted(suspects.items()))
            raise DataError(
                f"a window must not end its actor; {MAX_DEATHS} ended in {found}: see the Ray logs, give the actors "
                "memory (`ingest plan` says how much), or leave the file out"
            )

    def _make(self, spec: WindowSpec) -> tuple[Window, dict[str, float]]:
        watch, number = Stopwatch(), spec.cursors.window
        node, pid = ray.get_runtime_context().get_node_id()[:8], os.getpid()

        def what() -> str:
            return f"window {number} is being made by process {pid} of node {node}, last stage ended: {watch.last}"

        with watched(what, lambda words: self._tell(number, words), self._warn_s):
            window = self._maker(spec, lambda make: self._turns.submit(number, make).result(), watch)
        before, self._before = self._before, self._meters()
        return window, {**watch.seconds, **{name: now - before[name] for name, now in self._before.items()}}

    def _tell(self, window: int, words: str) -> None:
        with contextlib.suppress(ValueError, ray.exceptions.RayError):  # the stream has ended
            ray.get_actor(self._server).note.remote(window, words)

    def _meters(self) -> dict[str, float]:
        """What this process spent so far."""
        return {"cpu": time.process_time(), **asdict(self._maker.storage.traffic)}


def _some(files: list[str]) -> str:
    return ", ".join(files[:8]) + (f" and {len(files) - 8} more" if len(files) > 8 else "")
