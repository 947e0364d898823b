"""What a training worker says while it runs, and reports when it saves."""

from __future__ import annotations

import logging
import time
from typing import Any

import ray.train

import ingest

EVERY_S = 5.0
SHORT_AFTER_S = 30.0


class Progress:
    """Counts of this attempt, and one line about every five seconds on the log of rank 0."""

    def __init__(self, loader: ingest.Loader, config: ingest.IngestConfig, log: logging.Logger | None) -> None:
        self._loader = loader
        self._slots = config.global_batch_rows * config.packing.sequence_length
        self._start = loader.position
        self._losses: list[float] = []
        self._began = self._said = time.perf_counter()
        self._short = False
        self._log = log
        if log and self._start.step:
            workers, start = ray.train.get_context().get_world_size(), self._start
            log.info("resumed at step %d on %d workers, digest %s", start.step, workers, start.digest)
            for change in start.accepted:
                log.info("accepted at %s", change)

    def step(self, loss: float) -> None:
        """Takes note of a step's loss."""
        self._losses.append(loss)
        now = time.perf_counter()
        if self._log and (len(self._losses) == 1 or now - self._said >= EVERY_S):
            self._said = now
            rate, waiting = self._rates()
            words = "step %d: loss %.3f, %d tokens, %.0f tokens/s, waiting for data %.1f %%"
            position = self._loader.position
            self._log.info(words, position.step, loss, position.tokens, rate, 100 * waiting)
            if not self._short and now - self._began > SHORT_AFTER_S and (line := self._loader.timing.shortage()):
                self._short = True
                self._log.info("%s", line)

    def metrics(self) -> dict[str, Any]:
        """Of this attempt: losses in nats, tokens without padding, tokens a second and waiting after the first batch.

        ``padding_share`` is of the places of all rows.
        """
        now, steps = self._loader.position, self._loader.position.step - self._start.step
        tokens = now.tokens - self._start.tokens
        rate, waiting = self._rates()
        return {
            "steps": steps,
            "tokens": tokens,
            "first_loss": self._losses[0] if self._losses else None,
            "last_loss": sum(self._losses[-10:]) / len(self._losses[-10:]) if self._losses else None,
            "tokens_per_s": rate,
            "first_batch_s": self._loader.timing.first_batch_s,
            "wait_share": waiting,
            "short_of": self._loader.timing.shortage(),
            "padding_share": 1 - tokens / (steps * self._slots) if steps else 0.0,
        }

    def _rates(self) -> tuple[float, float]:
        timing = self._loader.timing
        elapsed = time.perf_counter() - self._began - timing.first_batch_s
        tokens = self._loader.position.tokens - self._start.tokens
        return (tokens / elapsed, timing.wait_s / elapsed) if elapsed > 0 else (0.0, 0.0)


def report(result: ray.train.Result, wall_s: float) -> None:
    """Prints the last reported metrics and where the last checkpoint lies."""
    checkpoint = None if result.checkpoint is None else result.checkpoint.path
    for name, value in {**(result.metrics or {}), "wall_s": wall_s, "checkpoint": checkpoint}.items():
        if value is None:
            continue
        print(f"{name:<16} {value:,.4g}" if isinstance(value, float) else f"{name:<16} {value}")
