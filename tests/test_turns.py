from __future__ import annotations

import gc
import threading
import weakref

import pytest

from ingest.turns import Turns


def blocked(turns: Turns) -> threading.Event:
    """Keeps the thread busy until the event is set, so that what is asked for meanwhile waits."""
    begun, go = threading.Event(), threading.Event()
    turns.submit(-1, lambda: begun.set() or go.wait(10))
    assert begun.wait(10)
    return go


def test_of_the_calls_that_wait_the_earliest_window_is_next_and_ties_keep_their_order() -> None:
    turns, made = Turns(), []
    go = blocked(turns)
    calls = [
        turns.submit(ordinal, lambda place=place: made.append(place)) for place, ordinal in enumerate([3, 1, 2, 1])
    ]
    go.set()
    for call in calls:
        call.result(10)
    assert made == [1, 3, 2, 0]


def test_an_idle_thread_lets_an_earlier_window_that_comes_at_once_go_first() -> None:
    turns, made = Turns(), []
    turns.submit(-1, lambda: None).result(10)
    calls = [turns.submit(ordinal, lambda ordinal=ordinal: made.append(ordinal)) for ordinal in (1, 0)]
    for call in calls:
        call.result(10)
    assert made == [0, 1]


def test_every_call_runs_on_one_thread() -> None:
    turns = Turns()
    threads = [turns.submit(ordinal, threading.get_ident).result(10) for ordinal in range(3)]
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


def test_an_error_is_raised_where_the_call_was_asked_for_and_the_next_one_runs() -> None:
    turns = Turns()
    with pytest.raises(ZeroDivisionError):
        turns.submit(0, lambda: 1 // 0).result(10)
    assert turns.submit(1, lambda: 7).result(10) == 7


def test_a_result_is_not_kept_for_the_next_call() -> None:
    class Window:
        pass

    turns = Turns()
    kept = weakref.ref(turns.submit(0, Window).result(10))
    turns.submit(1, lambda: None).result(10)
    gc.collect()
    assert kept() is None
