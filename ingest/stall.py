"""Where a process stands, said when something takes too long: all its threads, or a call that does not end.

Cost: nothing until then but a sleeping thread a call.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator

WARN_S = 60.0


def stacks() -> str:
    """Every thread of this process, by name, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
    )


@contextlib.contextmanager
def watched(what: Callable[[], str], say: Callable[[str], None], after_s: float = WARN_S) -> Iterator[None]:
    """Says every ``after_s`` seconds until the block ends what it is, how long it takes, and where all threads stand.

    Args:
        what: one line, asked each time.
        say: called on a thread of its own.
        after_s: seconds.
    """
    done = threading.Event()

    def watch() -> None:
        taken = after_s
        while not done.wait(after_s):
            say(f"{what()}, for {taken:.0f} s\n{stacks()}")
            taken += after_s

    threading.Thread(target=watch, name="ingest-watch", daemon=True).start()
    try:
        yield
    finally:
        done.set()
