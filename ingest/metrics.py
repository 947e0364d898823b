"""What is measured at the seams: where the actors' time goes, how long the consumer waits, and which stage is short.

Each slab brings along what its whole window cost its actor, so every rank knows the actors' figures without asking
anyone: seconds by stage, CPU seconds, and the requests that its process made of the store meanwhile. None of it decides
content or order. Cost: four clock reads a megabyte of text.

How to read them: ``wait_share`` is what the GPUs lose. Where it is not small, the largest of the actors' shares says
what is short: ``read``, the storage or the network; ``tokenize`` and ``pack``, CPUs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

STAGES = ("read", "tokenize", "pack")
"""Of an actor: waiting for bytes; text to ids; packing, shuffling and hashing."""

TRAFFIC = ("requests", "read_bytes", "retries")
"""Of an actor's store, see ``ranged.Traffic``."""

ENOUGH = 0.01  # share of time that may be spent waiting before it is worth a line
SAID_AFTER_S = 60.0  # by then the first windows and the trainer's own warming up no longer tip the scales


class Stopwatch:
    """Seconds spent in each stage of a window, by ``clock``."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.last: str | None = None  # the stage that ended last
        self._clock = clock
        self._last = clock()

    def start(self) -> None:
        """What passed since the last lap belongs to no stage."""
        self._last = self._clock()

    def lap(self, stage: str) -> None:
        """Books the time since the last lap."""
        now = self._clock()
        self.seconds[stage] += now - self._last
        self._last, self.last = now, stage


@dataclass
class Timing:
    """What a loader measured since its iteration began, in seconds.

    Args:
        first_batch_s: from the start of iteration to the first batch.
        wait_s: time the consumer stood waiting for a batch after the first one.
        elapsed_s: from the first batch to now.
        spent: of the windows that arrived, over all actors: seconds of each of ``STAGES``; ``cpu``, the CPU seconds of
            the actors' processes; and ``TRAFFIC``.
        made_tokens: input tokens of those windows.
        said: whether ``complaint`` has given its line.
    """

    first_batch_s: float = 0.0
    wait_s: float = 0.0
    elapsed_s: float = 0.0
    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    made_tokens: int = 0
    said: bool = False

    @property
    def wait_share(self) -> float:
        """Share of the time after the first batch spent waiting for data, 0 to 1."""
        return self.wait_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def stage_shares(self) -> dict[str, float]:
        """Share of the actors' time in each stage, 0 to 1; zeros before the first window."""
        total = sum(self.spent[stage] for stage in STAGES)
        return {stage: self.spent[stage] / total if total else 0.0 for stage in STAGES}

    @property
    def cpu_s_per_million_tokens(self) -> float:
        """CPU seconds of the actors for a million tokens."""
        return self.spent["cpu"] / self.made_tokens * 1e6 if self.made_tokens else 0.0

    @property
    def traffic(self) -> dict[str, int]:
        """Requests made of the store for the windows that arrived, bytes read, and retries among the requests."""
        return {name: int(self.spent[name]) for name in TRAFFIC}

    def note(self, tokens: int, spent: Mapping[str, float]) -> None:
        """Takes note of a window that arrived."""
        self.made_tokens += tokens
        for stage, value in spent.items():
            self.spent[stage] += value

    def complaint(self) -> str | None:
        """The line of ``shortage``, once, after ``SAID_AFTER_S`` seconds; None at any other time."""
        line = None if self.said or self.elapsed_s < SAID_AFTER_S else self.shortage()
        self.said |= line is not None
        return line

    def shortage(self) -> str | None:
        """One line that says which stage is short and by how much; None where the consumer waits under 1 %."""
        waiting = self.wait_share
        if waiting < ENOUGH or not self.made_tokens:
            return None
        stage, share = max(self.stage_shares.items(), key=lambda item: item[1])
        cause = {"read": "the storage or its network is short", "tokenize": "CPUs are short", "pack": "CPUs are short"}
        remedy = {"read": "place actors nearer to the data or add some"}.get(stage, "raise resources.tokenize_actors")
        factor = f"{1 / (1 - waiting):.2f} times" if waiting < 0.9 else "10 times and more"
        return (
            f"waited {waiting:.0%} of the time for data: {cause[stage]}, actors spend {share:.0%} of their time to "
            f"{stage}; {factor} as many would do: {remedy}"
        )
