"""Lines from workers to the driver's screen: what the ``ingest`` logger says on any worker, and nothing else.

In the other direction it says whether the driver was told to end. Ray's own forwarding brings every line of every
process, its own chatter included; the job switches it off and uses this. What Ray and the workers print besides stays
in Ray's log files.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

POLL_S = 0.5


@ray.remote(num_cpus=0)
class Mailbox:
    """Keeps lines until the driver takes them; about 50 bytes each, taken twice a second."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._ends = False

    def end(self) -> None:
        """Takes note that the run is to end with its next checkpoint."""
        self._ends = True

    def ends(self) -> bool:
        """Whether it is."""
        return self._ends

    def put(self, line: str) -> None:
        """Adds a line."""
        self._lines.append(line)

    def take(self) -> list[str]:
        """The lines since the last call."""
        lines, self._lines = self._lines, []
        return lines


class Post(logging.Handler):
    """Sends log records to a mailbox."""

    def __init__(self, mailbox: Any) -> None:
        super().__init__()
        self._mailbox = mailbox

    def emit(self, record: logging.LogRecord) -> None:
        """Sends one record; never waits."""
        self._mailbox.put.remote(self.format(record))


def send_log(mailbox: Any) -> logging.Logger:
    """The ``ingest`` logger of this worker, from INFO on, connected to the driver's screen."""
    log = logging.getLogger("ingest")
    log.setLevel(logging.INFO)
    log.handlers = [Post(mailbox)]
    log.propagate = False
    return log


@contextlib.contextmanager
def opened(say: Callable[[str], None]) -> Iterator[Any]:
    """A mailbox whose lines are said in this process until the block ends."""
    here = NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )  # other nodes come and go
    mailbox: Any = Mailbox.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]
    done = threading.Event()

    def listen() -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            last = False
            while not last:
                last = done.wait(POLL_S)
                for line in ray.get(mailbox.take.remote(), timeout=30):
                    say(line)

    thread = threading.Thread(target=listen, name="mailbox", daemon=True)
    thread.start()
    try:
        yield mailbox
    finally:
        done.set()
        thread.join(timeout=5)
