from __future__ import annotations

import pytest

from ingest.metrics import STAGES, Stopwatch, Timing


def timing(wait_s: float, **actors_s: float) -> Timing:
    made = Timing(first_batch_s=5.0, wait_s=wait_s, elapsed_s=10.0)
    made.note(2_000_000, actors_s)
    return made


def test_shares_are_of_the_stages_and_cpu_seconds_are_per_million_tokens() -> None:
    made = timing(0.0, read=1.0, tokenize=7.0, pack=2.0, cpu=3.0)
    assert made.stage_shares == {"read": 0.1, "tokenize": 0.7, "pack": 0.2}
    assert made.cpu_s_per_million_tokens == 1.5
    made.note(1_000_000, {"read": 10.0, "tokenize": 0.0, "pack": 0.0, "cpu": 0.0})
    assert made.stage_shares == {"read": 0.55, "tokenize": 0.35, "pack": 0.1}
    assert made.cpu_s_per_million_tokens == 1.0


def test_what_was_asked_of_the_store_is_summed_over_the_windows() -> None:
    made = timing(0.0, requests=3, read_bytes=100, retries=0)
    made.note(1, {"read": 1.0, "requests": 2, "read_bytes": 50, "retries": 1})
    assert made.traffic == {"requests": 5, "read_bytes": 150, "retries": 1}
    assert Timing().traffic == {"requests": 0, "read_bytes": 0, "retries": 0}


def test_nothing_measured_divides_by_nothing() -> None:
    assert (Timing().wait_share, Timing().cpu_s_per_million_tokens) == (0.0, 0.0)
    assert Timing().stage_shares == dict.fromkeys(STAGES, 0.0)
    assert Timing().shortage() is None


def test_a_consumer_that_hardly_waits_is_short_of_nothing() -> None:
    assert timing(0.09, read=1.0, tokenize=9.0).shortage() is None


@pytest.mark.parametrize(
    ("wait_s", "seconds", "line"),
    [
        (
            2.0,
            {"read": 1.0, "tokenize": 8.0, "pack": 1.0},
            "waited 20% of the time for data: CPUs are short, actors spend 80% of their time to tokenize; 1.25 times "
            "as many would do: raise resources.tokenize_actors",
        ),
        (
            9.5,
            {"read": 9.0, "tokenize": 1.0, "pack": 0.0},
            "waited 95% of the time for data: the storage or its network is short, actors spend 90% of their time to "
            "read; 10 times and more as many would do: place actors nearer to the data or add some",
        ),
    ],
)
def test_a_shortage_is_one_line_with_the_stage_and_the_factor(wait_s: float, seconds: dict, line: str) -> None:
    assert timing(wait_s, **seconds).shortage() == line


def test_a_shortage_is_said_once_and_not_at_the_start() -> None:
    made = timing(2.0, read=0.0, tokenize=1.0, pack=0.0)
    assert made.complaint() is None
    made.wait_s, made.elapsed_s = 0.1, 61.0
    assert made.complaint() is None
    made.wait_s = 6.1
    assert (made.complaint() or "").startswith("waited 10% of the time for data: CPUs are short")
    assert made.complaint() is None


def test_a_lap_books_the_time_since_the_last_one() -> None:
    watch = Stopwatch(iter([0.0, 5.0, 6.0, 8.0, 8.5]).__next__)
    watch.start()
    watch.lap("read")
    watch.lap("tokenize")
    watch.lap("read")
    assert watch.seconds == {"read": 1.5, "tokenize": 2.0}
