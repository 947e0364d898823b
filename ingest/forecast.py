"""What a run will demand, from the plan alone: windows, steps, padding, memory and rates, before any GPU is booked.

Token counts are estimates from sampled text (the manifest's ``tokens_per_mib``), right to a few percent; the order and
the number of windows are exact.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

from ingest.documents import UNITS_AHEAD
from ingest.parquet import WHOLE_CHUNK_BYTES
from ingest.run import Run

INTERPRETER_BYTES = 300 << 20  # an actor before it has read anything

MAX_WINDOWS = 100_000  # planned one by one up to here; beyond, figures are of this many
# One core; measure yours with `ingest stream --ceiling`.
ACTOR_TOKENS_PER_S = {"tokenizers": 500_000, "tiktoken": 4_000_000, "packed": 100_000_000}
PADDING_GOAL = 0.005


def forecast(run: Run, step_time_s: float) -> dict[str, Any]:
    """The figures that ``ingest plan`` prints.

    Args:
        run: the prepared run.
        step_time_s: seconds that a training step takes, which sets the demanded rate.
    """
    config = run.config
    row, lanes = config.packing.sequence_length, config.lanes
    windows = list(islice(run.plan.windows(run.plan.start()), MAX_WINDOWS))
    tokens = [window.tokens for window in windows]
    rows = [math.ceil(count / (row * lanes)) * lanes for count in tokens]
    total_tokens = config.total_tokens or sum(tokens)
    num_steps = math.ceil(total_tokens * sum(rows) / max(1, sum(tokens)) / config.global_batch_rows)
    text_bytes = sum(int(source.unit_text_bytes.sum()) for source in run.manifest.sources)
    one_pass = sum(int(source.unit_tokens.sum()) for source in run.manifest.sources)
    rate = config.global_batch_rows * row / step_time_s
    backend = _backend(run)
    largest = max(tokens)
    bound = lanes / min(rows)
    return {
        "windows": len(windows)
        if config.total_tokens is None
        else math.ceil(total_tokens / (sum(tokens) / len(tokens))),
        "window_tokens": run.window_tokens,
        "largest_window_tokens": largest,
        "steps": num_steps,
        "tokens": total_tokens,
        "padding_bound": bound,
        "lanes": lanes,
        "world_sizes": " ".join(str(size) for size in range(1, lanes + 1) if lanes % size == 0),
        "actor_memory_bytes": actor_bytes(run, largest),
        "demanded_tokens_per_s": rate,
        "demanded_bytes_per_s": rate * text_bytes / one_pass,
        "demanded_actors": math.ceil(rate / ACTOR_TOKENS_PER_S[backend]),
        "backend": backend,
        "warnings": _warnings(run, bound, rate, tokens),
    }


def _backend(run: Run) -> str:
    """What an actor does, by the key of ``ACTOR_TOKENS_PER_S``."""
    return "packed" if all(source.packed for source in run.manifest.sources) else run.tokenizer.backend_name


def _warnings(run: Run, bound: float, rate: float, tokens: list[int]) -> list[str]:
    config, found = run.config, [f"{s.name}: {warning}" for s in run.manifest.sources for warning in s.warnings]
    if bound > PADDING_GOAL:
        rows = math.ceil(1 / PADDING_GOAL) * config.lanes
        found.append(
            f"padding may reach {bound:.1%} in a window; its goal is {PADDING_GOAL:.1%}: fewer lanes, or "
            f"shuffle.window_tokens of {rows * config.packing.sequence_length:,} where the data has them"
        )
    if config.packing.strategy == "best_fit":
        found.append(
            "with best_fit rows are padded where no document fits, beyond padding_bound: `ingest stream` measures it"
        )
    high = config.resources.max_actors * ACTOR_TOKENS_PER_S[_backend(run)]
    if high < rate:
        found.append(
            f"{config.resources.max_actors} actors tokenize about {high:,} tokens/s and the trainer takes {rate:,.0f}: "
            f"raise resources.tokenize_actors"
        )
    if len(tokens) < config.resources.min_actors:
        found.append(
            f"{config.resources.min_actors} actors are more than the windows, {len(tokens)}: lower tokenize_actors"
        )
    largest_unit = max(int(source.unit_tokens.max()) for source in run.manifest.sources)
    if len(config.sources) > 1 and largest_unit > run.window_tokens:
        found.append(
            f"the largest row group has {largest_unit:,} tokens and fills a window of {run.window_tokens:,} alone, so "
            "sources do not mix within it: write smaller row groups, or raise shuffle.window_tokens"
        )
    if any(source.weight is not None for source in config.sources) and config.num_epochs is not None:
        found.append(
            "with epochs, a source that has finished its passes leaves the mix: total_tokens keeps the weights"
        )
    return found


def actor_bytes(run: Run, window_tokens: int) -> int:
    """Memory of an actor for windows of so many tokens: 2.5 times their bytes, text read ahead, the interpreter.

    It holds the tokens of the window that it makes once, and up to 0.4 of them again while they become rows, and once
    those of the window that it ships. Of each row group that is read ahead it holds 64 MiB at most. What lies in the
    object store is not in it.
    """
    unit_bytes = max(int(source.unit_text_bytes.max()) for source in run.manifest.sources)
    text_bytes = UNITS_AHEAD * min(unit_bytes, WHOLE_CHUNK_BYTES)
    return 5 * window_tokens * run.token_dtype.itemsize // 2 + text_bytes + INTERPRETER_BYTES
