"""What a run on a thousand GPUs asks of the parts, in one process: a million row groups, 512 ranks."""

import itertools
import json
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest

from ingest.config import IngestConfig
from ingest.lanes import Lanes, steps
from ingest.manifest import Manifest
from ingest.plan import Plan, PlanSource
from ingest.run import Run
from ingest.source import FileEntry, SourceManifest
from tests.conftest import ROOT, steps_without_ray, texts, until, write_config, write_corpus

FILES, ROW_GROUPS = 10_000, 100


def corpus():
    """The manifest of 10,000 files of 100 row groups of 2 MB each: 2 TB, about 0.5 trillion tokens."""
    files = tuple(
        FileEntry(f"bucket/part-{number:05}.parquet", 10**8 + number, f"{number:016x}", "1") for number in range(FILES)
    )
    units = FILES * ROW_GROUPS
    file, row_group = np.divmod(np.arange(units), ROW_GROUPS)
    rows, text_bytes = np.full(units, 1000), 2_000_000 + np.arange(units) % 1000
    return Manifest((SourceManifest("web", files, file, row_group, rows, text_bytes, 250_000),))


def planned(manifest):
    [source] = manifest.sources
    weight = int(source.unit_tokens.sum())
    sources = [PlanSource(source.name, source.unit_tokens, weight)]
    return Plan(sources, seed=0, shuffle=True, window_tokens=8_000_000, num_epochs=1)


def a_million_row_groups():
    """Plans all of them and resumes at 90 %; seconds of each, and the peak of this process's memory."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    manifest = Manifest.from_bytes(corpus().to_bytes())
    stored_s, began = time.perf_counter() - began, time.perf_counter()
    windows = list(planned(manifest).windows(planned(manifest).start()))
    plan_s = time.perf_counter() - began
    units = Counter(unit.number for window in windows for unit in window.units)
    assert units == Counter(range(FILES * ROW_GROUPS))

    late = len(windows) * 9 // 10
    began = time.perf_counter()
    again = planned(manifest).windows(windows[late].cursors)
    assert next(again) == windows[late]
    resume_s = time.perf_counter() - began
    assert list(again) == windows[late + 1 :]
    peak_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    return {
        "windows": len(windows),
        "stored_s": round(stored_s, 2),
        "plan_s": round(plan_s, 2),
        "resume_s": round(resume_s, 2),
        "peak_mib": peak_mib,
    }


@pytest.mark.slow
def test_a_million_row_groups_are_planned_once_each_and_a_late_resume_costs_no_replay():
    code = "import json, tests.test_scale as scale; print(json.dumps(scale.a_million_row_groups()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert 55_000 < found["windows"] < 65_000
    assert found["resume_s"] < found["plan_s"] / 2
    assert found["peak_mib"] < 600  # with every window of the plan held by the test, which a run never does


def fewest_first(slabs, world_size):
    """A stand-in for Ray's splitter: each block of one row to the output with the fewest rows so far."""
    outputs = [[] for _ in range(world_size)]
    for slab in slabs:
        min(outputs, key=len).append(slab)
    return outputs


def rows_of(step):
    """(window, row, tokens) of each row."""
    addresses = zip(step.window_B.tolist(), step.index_B.tolist(), strict=True)
    return [(*address, tokens.tobytes()) for address, tokens in zip(addresses, step.rows.tokens_BX, strict=True)]


@pytest.mark.parametrize("world_size", [512, 64])
def test_512_lanes_give_every_rank_its_own_rows_of_every_global_batch(tmp_path, tokenizer_file, world_size):
    write_corpus(tmp_path / "corpus", texts(400, seed=3, words=(100, 300)), files=3)
    path = write_config(
        tmp_path / "run.yaml",
        tokenizer={"path": str(tokenizer_file), "backend": "tokenizers"},
        lanes=512,
        global_batch_rows=1024,
        shuffle={"window_tokens": 30_000},
    )
    config = IngestConfig.from_yaml(path)
    expected, run = steps_without_ray(config), Run.prepare(config)
    start, eos_id = run.start(), run.tokenizer.eos_id
    slabs = itertools.chain.from_iterable(run.maker(spec).slabs(world_size) for spec in run.specs(start.cursors))
    outputs = fewest_first(slabs, world_size)
    ranks = [
        list(steps(iter(mine), start, Lanes(512, 1024, rank, world_size), eos_id, None))
        for rank, mine in enumerate(outputs)
    ]
    assert len(expected) > 2
    for number, whole in enumerate(expected):
        parts = [found[number] for found in ranks]
        assert all(part.position == whole.position for part in parts)
        assert {len(part.rows) for part in parts} == {1024 // world_size}
        assert Counter(row for part in parts for row in rows_of(part)) == Counter(rows_of(whole))
    assert {len(found) for found in ranks} == {len(expected)}


class Tables:
    """The slabs of a leg, as Ray hands them out."""

    def __init__(self, tables):
        self._tables = tables

    def iter_batches(self, **options):
        yield from self._tables


class Legs:
    """Stands in for the stream's server: legs of 20 windows, and a note of those that were asked for."""

    def __init__(self, tables):
        self._legs = [tables[:20], tables[20:]]
        self._asked = 0

    def iterator(self, leg, rank):
        self._asked = max(self._asked, leg + 1)
        tables = self._legs[leg] if leg < len(self._legs) else []
        return Tables(tables), len(tables)

    def asked(self):
        return self._asked


@pytest.mark.ray
def test_a_leg_starts_16_windows_before_the_one_before_ends(shared_ray, tmp_path, tokenizer_file):
    import ray

    from ingest.pipeline import Stream

    write_corpus(tmp_path / "corpus", texts(400, seed=3), row_group_size=5)
    tokenizer = {"path": str(tokenizer_file), "backend": "tokenizers"}
    path = write_config(tmp_path / "run.yaml", tokenizer=tokenizer, shuffle={"window_tokens": 300})
    run = Run.prepare(IngestConfig.from_yaml(path))
    specs = list(itertools.islice(run.specs(run.start().cursors), 30))
    tables = [slab.to_table() for spec in specs for slab in run.maker(spec).slabs(1)]
    assert len(tables) == 30
    server = ray.remote(Legs).remote(tables)
    slabs = Stream(server, "legs").slabs(0)
    taken = [next(slabs).window for _ in range(3)]
    assert ray.get(server.asked.remote()) == 1
    taken.append(next(slabs).window)
    until(lambda: ray.get(server.asked.remote()) == 2, 30, "the next leg, with 16 windows of this one left")
    assert taken + [slab.window for slab in slabs] == list(range(30))
    assert ray.get(server.asked.remote()) == 3
