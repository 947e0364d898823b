"""What asks a run for a checkpoint at once: a node that will be taken away, or a driver that was told to end (SIGTERM).

Asked by time and answered alike on every rank at the same step: rank 0's clock says when, and asking waits for all
ranks. A step costs one sum over the ranks for it, and asking itself 10 ms, every two seconds.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train.collective import broadcast_from_rank_zero

from jobs.step import summed

EVERY_S = 2.0
ENDED = 128 + signal.SIGTERM  # the exit code of a driver that saved because it was told to end


class Notices:
    """One worker's side.

    Args:
        mailbox: knows whether the driver was told to end.
    """

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox
        self._next = time.monotonic()
        self._known: Any = None

    def ask(self) -> tuple[bool, bool]:
        """Whether to save now, and whether to end then; every rank must call it after the same steps."""
        first, now = ray.train.get_context().get_world_rank() == 0, time.monotonic()
        due = torch.tensor(float(first and now >= self._next), device=ray.train.torch.get_device())
        if not summed(due)[0]:
            return False, False
        self._next = now + EVERY_S
        before, self._known = self._known, ray.train.get_preemption_info()
        ends: bool = broadcast_from_rank_zero(ray.get(self._mailbox.ends.remote()) if first else None)
        return ends or self._known != before, ends


@contextlib.contextmanager
def at_sigterm(mailbox: Any) -> Iterator[threading.Event]:
    """The driver's side: inside the block the first SIGTERM asks the workers to save and end, the second ends at once.

    Yields:
        Set when a SIGTERM came.
    """
    told = threading.Event()

    def tell(*_: Any) -> None:
        if told.is_set():
            sys.exit(ENDED)
        told.set()
        mailbox.end.remote()
        print(f"SIGTERM: a last checkpoint, then exit code {ENDED}; another SIGTERM ends at once", file=sys.stderr)

    if threading.current_thread() is not threading.main_thread():  # as in a notebook's thread: no signals there
        yield told
        return
    before = signal.signal(signal.SIGTERM, tell)
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)
