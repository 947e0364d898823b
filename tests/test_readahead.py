"""The bounded queue: items in order, errors behind them, an end to every thread and every wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ingest.readahead import ReadAhead


def soon(holds: Callable[[], bool], within_s: float = 5.0) -> bool:
    until = time.monotonic() + within_s
    while not holds() and time.monotonic() < until:
        time.sleep(0.005)
    return holds()


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_items_come_in_order_and_end() -> None:
    ahead = ReadAhead(iter(range(5)), 2, "order")
    assert list(ahead) == [0, 1, 2, 3, 4]
    assert soon(lambda: not threads("order"))


def test_an_error_comes_behind_the_items_before_it() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    ahead = ReadAhead(failing(), 4, "failing")
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="broken"):
        next(ahead)


def test_no_more_items_are_made_than_the_depth_and_one_in_hand() -> None:
    made = []

    def counting() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    ahead = ReadAhead(counting(), 3, "bounded")
    assert next(ahead) == 0
    assert soon(lambda: len(made) == 1 + 3 + 1)
    assert not soon(lambda: len(made) > 5, within_s=0.05)
    ahead.close()
    assert soon(lambda: not threads("bounded"))


def test_waiting_ends_with_the_error_that_names_the_cause() -> None:
    gate = threading.Event()

    def standing() -> Iterator[int]:
        yield 7
        gate.wait()

    ahead = ReadAhead(standing(), 1, "standing", 0.05, lambda last: TimeoutError(f"nothing came behind {last}"))
    assert next(ahead) == 7
    with pytest.raises(TimeoutError, match="nothing came behind 7"):
        next(ahead)
    gate.set()
    ahead.close()
    assert soon(lambda: not threads("standing"))


def test_a_wait_that_is_too_long_is_logged_with_the_place_where_its_thread_stands(caplog) -> None:
    gate = threading.Event()

    def nobody_answers() -> Iterator[int]:
        gate.wait()
        yield 1

    ahead = ReadAhead(nobody_answers(), 1, "silent", 0.05, lambda last: TimeoutError(f"nothing behind {last}"))
    with pytest.raises(TimeoutError):
        next(ahead)
    [said] = [record.getMessage() for record in caplog.records if record.name == "ingest"]
    first, *stack = said.splitlines()
    assert first == "silent has waited 0 s; nothing behind None"
    assert any(line.endswith(", in nobody_answers") for line in stack)
    gate.set()
    ahead.close()
    assert soon(lambda: not threads("silent"))


def test_closing_wakes_a_consumer_that_waits() -> None:
    gate, got = threading.Event(), []

    def standing() -> Iterator[int]:
        gate.wait()
        yield 1

    ahead = ReadAhead(standing(), 1, "woken")
    consumer = threading.Thread(target=lambda: got.extend(ahead))
    consumer.start()
    ahead.close()
    consumer.join(timeout=5)
    assert (consumer.is_alive(), got) == (False, [])
    gate.set()
    assert soon(lambda: not threads("woken"))
