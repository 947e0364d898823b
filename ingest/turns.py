"""One thread that makes an actor's windows, the earliest of those that wait first.

Guarantees: calls run one at a time and never overtake an earlier window that waits too, so that the window which the
ranks stand at is not made after one that they need later. What a call raises is raised where it was asked for.

All windows of an actor are made on the same thread because the caches of tiktoken's regex belong to the thread that
used them first: any other one takes a detour at each piece of text, which costs 20 %. A lock held in turn by Ray's
threads was the first version: it had both faults.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

SETTLE_S = 0.3  # an idle thread waits so long for an earlier window than the first one that is asked for

T = TypeVar("T")

_Call = tuple[int, int, "Future[Any]", Callable[[], Any]]


class Turns:
    """Runs calls on a thread of its own, which lives as long as the process."""

    def __init__(self) -> None:
        self._waiting: queue.PriorityQueue[_Call] = queue.PriorityQueue()
        self._number = itertools.count()  # ties go in the order of asking, and calls are never compared
        threading.Thread(target=self._run, name="ingest-make", daemon=True).start()

    def submit(self, ordinal: int, call: Callable[[], T]) -> Future[T]:
        """Asks for a call; of those that wait, the one with the lowest ordinal is next."""
        future: Future[T] = Future()
        self._waiting.put((ordinal, next(self._number), future, call))
        return future

    def _run(self) -> None:
        while True:
            idle = self._waiting.empty()
            first = self._waiting.get()
            if idle:  # Ray starts the calls of an actor together, in either order
                time.sleep(SETTLE_S)
                self._waiting.put(first)
                first = self._waiting.get()
            _, _, future, call = first
            try:
                future.set_result(call())
            except BaseException as error:  # raised again by result()
                future.set_exception(error)
            del first, future, call  # or a window would stay in memory until the next one is asked for
