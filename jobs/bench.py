"""The same text to the same batches, by this package and as it is usually written: tokens a second and the first batch.

    python -m jobs.bench --config run.yaml [--tokens N] [--rounds R] [--only NAME] [--pace TOKENS_PER_S]

Contenders, each in a process of its own, in turn, so that the machine's mood touches all of them alike:

    ingest      this package, one rank
    ray_data    Ray Data as its documentation teaches it: read_parquet, map_batches on an actor pool, streaming_split,
                iter_torch_batches with a local shuffle buffer; no position, no exact steps
    torch       a tuned torch DataLoader over an IterableDataset, prefetch 64; one host only, no resume

All use the config's tokenizer and backend, as many processes as ``resources.tokenize_actors`` allows, and stop after N
tokens. ``overall`` counts from the start of iteration, ``steady`` from the first batch. With a pace, each batch is
followed by the pause that a trainer of that rate would make, and ``wait_share`` says how much of its time it lost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import ingest
from ingest.cluster import ensure_ray
from ingest.run import Run
from jobs.baselines import ray_data_rows, torch_rows

NAMES = ("ingest", "ray_data", "torch")
Batches = Iterator[int]  # tokens of each batch


def ingest_batches(run: Run) -> Batches:
    """Batches of this package."""
    with ingest.Loader(run.config, run=run) as loader:
        for batch in loader:
            yield batch.num_tokens


def baseline_batches(rows: Callable[[Run], Iterator[torch.Tensor]], run: Run) -> Batches:
    """Batches of a contender, split into inputs and labels as a training step needs them."""
    for tokens_BX in rows(run):
        inputs, labels = tokens_BX[:, :-1].long(), tokens_BX[:, 1:].long()
        assert inputs.shape == labels.shape
        yield inputs.numel()


def timed(batches: Batches, limit: int, pace: float | None = None) -> dict[str, float]:
    """Drains batches up to ``limit`` tokens, ``pace`` tokens a second at most."""
    began = time.perf_counter()
    first = tokens = next(batches)
    first_s, waited = time.perf_counter() - began, 0.0
    while tokens < limit:
        if pace:
            time.sleep(first / pace)
        asked = time.perf_counter()
        more = next(batches, None)
        waited += time.perf_counter() - asked
        if more is None:
            break
        tokens += more
    elapsed = time.perf_counter() - began
    return {
        "first_batch_s": first_s,
        "overall_tokens_per_s": tokens / elapsed,
        "steady_tokens_per_s": (tokens - first) / (elapsed - first_s),
        "wait_share": waited / (elapsed - first_s),
    }


def contend(name: str, path: str, limit: int, pace: float | None = None) -> dict[str, float]:
    """One contender in this process."""
    torch.set_num_threads(1)  # or each small operation waits for a thread on a core that a tokenizer holds
    settings = ingest.IngestConfig.from_yaml(path).to_dict() | {"total_tokens": limit}
    settings.pop("epochs", None)
    run = Run.prepare(ingest.IngestConfig.from_dict(settings))
    if name != "torch":
        ensure_ray(run.config, extra_cpus=1)  # starting Ray is not what is compared
    if name == "ingest":
        return timed(ingest_batches(run), limit, pace)
    return timed(baseline_batches({"ray_data": ray_data_rows, "torch": torch_rows}[name], run), limit, pace)


def main(arguments: list[str] | None = None) -> int:
    """Runs the contenders in turn and prints the median of each figure."""
    parser = argparse.ArgumentParser(prog="python -m jobs.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, metavar="FILE", help="run.yaml")
    parser.add_argument("--tokens", type=int, default=25_000_000, metavar="N", help="of each run (default 25 million)")
    parser.add_argument("--rounds", type=int, default=3, metavar="R", help="runs of each contender (default 3)")
    parser.add_argument("--only", choices=NAMES, help="one run of one contender, as JSON")
    parser.add_argument("--pace", type=float, metavar="R", help="tokens/s of a trainer, with --only")
    options = parser.parse_args(arguments)
    if options.only:
        print(json.dumps(contend(options.only, options.config, options.tokens, options.pace)), flush=True)
        return 0
    results: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    for _, name in itertools.product(range(options.rounds), NAMES):
        command = [sys.executable, "-m", "jobs.bench", "--config", options.config, "--tokens", str(options.tokens)]
        done = subprocess.run([*command, "--only", name], capture_output=True, text=True, timeout=900, check=False)  # noqa: S603 - our own
        if done.returncode:
            print(f"{name} failed: {done.stderr[-2000:]}", file=sys.stderr)
            return 1
        figures = [line for line in done.stdout.splitlines() if line.startswith("{")]  # Ray may have the last word
        results[name].append(json.loads(figures[-1]))
        print(f"{name:<10} {results[name][-1]}", file=sys.stderr, flush=True)
    report(results)
    return 0


def report(results: dict[str, list[dict[str, float]]]) -> None:
    """Medians, and the ratio of this package to each contender."""
    medians: dict[str, Any] = {
        name: {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]}
        for name, runs in results.items()
    }
    for name, figures in medians.items():
        ratios = {figure: medians["ingest"][figure] / value for figure, value in figures.items()}
        for figure, value in figures.items():
            print(f"{name:<10} {figure:<22} {value:>14,.2f}   ingest is {ratios[figure]:.2f} times this")


if __name__ == "__main__":
    np.random.seed(0)  # noqa: NPY002 - Ray Data's shuffle buffer draws from it
    sys.exit(main())
