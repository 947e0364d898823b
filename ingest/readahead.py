"""A bounded queue filled by a thread: the one place where something is read ahead of its consumer."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from ingest.stall import WARN_S, stacks

T = TypeVar("T")

_log = logging.getLogger("ingest")
LEAVE_S = 5.0  # a stream ends with its last rank, usually within half a second; longer while others go on


class _End:
    """What the thread puts last: the error that ended the items, or None."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class ReadAhead(Generic[T]):
    """Iterates over ``items`` on a thread of its own, at most ``depth`` ahead.

    Args:
        items: consumed on the thread; what it raises is raised by ``__next__``.
        depth: items ready at most.
        name: of the thread.
        limit_s: seconds without an item after which ``stalled`` is raised; None leaves waiting to whoever makes the
            items.
        stalled: makes that error, from the last item or None.
        report: where everything stands, logged with it every minute.
    """

    def __init__(
        self,
        items: Iterator[T],
        depth: int,
        name: str,
        limit_s: float | None = None,
        stalled: Callable[[T | None], Exception] = lambda _: TimeoutError(),
        report: Callable[[], str] = stacks,
    ) -> None:
        self._items: deque[T | _End] = deque()
        self._depth = depth
        self._changed = threading.Condition()
        self._closed = False
        self._limit_s = limit_s
        self._stalled = stalled
        self._report = report
        self._last: T | None = None
        self._thread = threading.Thread(target=self._fill, args=(items,), name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        item = self._get()
        if isinstance(item, _End):
            self._closed = True
            raise item.error or StopIteration
        self._last = item
        return item

    def close(self) -> None:
        """Lets the thread end after its current item, which is dropped, and wakes a consumer that waits."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def join(self) -> None:
        """Waits ``LEAVE_S`` for the thread to end, after ``close`` and whatever lets its current item end."""
        self._thread.join(LEAVE_S)

    def _get(self) -> T | _End:
        waited = 0.0
        while self._limit_s is None or waited < self._limit_s:
            pause = WARN_S if self._limit_s is None else min(WARN_S, self._limit_s - waited)
            with self._changed:
                if self._changed.wait_for(lambda: self._items or self._closed, pause):
                    self._changed.notify_all()
                    return self._items.popleft() if self._items else _End(None)
            waited += pause
            if self._limit_s is not None:
                words = "%s has waited %.0f s; %s\n%s"
                _log.warning(words, self._thread.name, waited, self._stalled(self._last), self._report())
        raise self._stalled(self._last)

    def _fill(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                if not self._put(item):
                    return
            self._put(_End(None))
        except BaseException as error:  # raised again by __next__, on the consumer's thread
            self._put(_End(error))

    def _put(self, item: T | _End) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._closed
