"""Where a process stands: every thread by name, and what does not end, said again and again until it does."""

from __future__ import annotations

import threading

from ingest.stall import stacks, watched


def test_every_thread_is_listed_with_where_it_stands() -> None:
    gate = threading.Event()

    def standing_here() -> None:
        gate.wait()

    thread = threading.Thread(target=standing_here, name="stands")
    thread.start()
    try:
        parts = stacks().split("thread ")
    finally:
        gate.set()
        thread.join()
    [mine] = [part for part in parts if part.startswith("stands:\n")]
    assert ", in standing_here" in mine
    assert any(part.startswith("MainThread:\n") for part in parts)


def test_what_takes_long_is_said_with_its_seconds_until_it_ends() -> None:
    said: list[str] = []
    thrice = threading.Event()

    def say(words: str) -> None:
        said.append(words)
        if len(said) == 3:
            thrice.set()

    with watched(lambda: "window 7", say, after_s=0.02):
        assert thrice.wait(10)
    assert [words.splitlines()[0] for words in said[:3]] == ["window 7, for 0 s"] * 3
    assert ", in test_what_takes_long_is_said_with_its_seconds_until_it_ends" in said[0]


def test_what_ends_in_time_is_not_said_and_its_watch_ends() -> None:
    before = {thread for thread in threading.enumerate() if thread.name == "ingest-watch"}
    said: list[str] = []
    with watched(lambda: "window 7", said.append, after_s=60):
        [watch] = {thread for thread in threading.enumerate() if thread.name == "ingest-watch"} - before
    watch.join(10)
    assert (watch.is_alive(), said) == (False, [])
