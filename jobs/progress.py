"""What a training worker says while it runs and reports when it saves."""

from __future__ import annotations

import time
from typing import Any

import ray.train

import ingest

EVERY_S = 5.0


class Progress:
    """Counts of this attempt, and one line about every five seconds from rank 0."""

    def __init__(self, loader: ingest.Loader, config: ingest.IngestConfig) -> None:
        self._loader = loader
        self._slots = config.global_batch_rows * config.packing.sequence_length
        self._start = loader.position
        self._losses: list[float] = []
        self._began = self._said = time.perf_counter()
        self._loud = ray.train.get_context().get_world_rank() == 0
        if self._loud and self._start.step:
            print(f"resumed at step {self._start.step}, digest {self._start.digest}", flush=True)

    def step(self, loss: float) -> None:
        """Takes note of a step's loss."""
        self._losses.append(loss)
        now = time.perf_counter()
        if self._loud and (len(self._losses) == 1 or now - self._said >= EVERY_S):
            self._said = now
            metrics = self.metrics()
            print(
                f"step {self._loader.position.step}: loss {loss:.3f}, {metrics['tokens_per_s']:,.0f} tokens/s, "
                f"waiting for data {metrics['wait_share']:.1%}",
                flush=True,
            )

    def metrics(self) -> dict[str, Any]:
        """Of this attempt: losses in nats, tokens a second and waiting after the first batch, padding as a share."""
        now, timing = self._loader.position, self._loader.timing
        steps, tokens = now.step - self._start.step, now.tokens - self._start.tokens
        elapsed = time.perf_counter() - self._began - timing.first_batch_s
        return {
            "first_loss": self._losses[0] if self._losses else None,
            "last_loss": sum(self._losses[-10:]) / len(self._losses[-10:]) if self._losses else None,
            "tokens_per_s": tokens / elapsed if elapsed > 0 else 0.0,
            "first_batch_s": timing.first_batch_s,
            "wait_share": timing.wait_s / elapsed if elapsed > 0 else 0.0,
            "padding_share": 1 - tokens / (steps * self._slots) if steps else 0.0,
            "resumed_at_step": self._start.step,
        }
