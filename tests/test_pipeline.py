"""Windows through a real Ray: errors, killed processes, legs, early leaving, and demands that do not fit."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest

from ingest.cluster import require_memory, require_resources
from ingest.config import IngestConfig, ResourcesConfig
from ingest.drain import drain
from ingest.errors import DataError, IngestError, OrderError, ResourceError, StorageError
from ingest.lanes import step_digest
from ingest.loader import Loader
from ingest.pipeline import Stream
from ingest.run import Run
from tests.conftest import CPUS, lines_of, start_ray, steps_without_ray, texts, until, write_config, write_corpus

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer_file):
    """Six windows of uneven files."""
    folder = tmp_path_factory.mktemp("pipeline")
    write_corpus(folder / "corpus", ["", *texts(120, seed=4)], files=[3, 4, 0, 54, 60], row_group_size=6)
    config = write_config(
        folder / "run.yaml",
        tokenizer={"path": str(tokenizer_file), "backend": "tokenizers"},
        shuffle={"window_tokens": 900},
        global_batch_rows=4,
    )
    return Run.prepare(IngestConfig.from_yaml(config))


@pytest.fixture(scope="module")
def long_run(tmp_path_factory, tokenizer_file):
    """Twelve windows that take one actor about half a second each."""
    folder = tmp_path_factory.mktemp("long")
    write_corpus(folder / "corpus", texts(400, seed=5, words=(1000, 3000)), files=4, row_group_size=5)
    config = write_config(
        folder / "run.yaml",
        tokenizer={"path": str(tokenizer_file), "backend": "tokenizers"},
        packing={"sequence_length": 512},
        shuffle={"window_tokens": 60_000},
        global_batch_rows=16,
    )
    return Run.prepare(IngestConfig.from_yaml(config))


@pytest.fixture(scope="module")
def expected(run):
    return steps_without_ray(run.config)


@pytest.fixture(scope="module")
def long_expected(long_run):
    return steps_without_ray(long_run.config)


def ray_processes(title):
    """The processes of this test's Ray whose title begins so."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            found += [process.pid] if process.cmdline()[:1][0].startswith(title) else []
        except (psutil.Error, IndexError):
            continue
    return found


def free_cpus():
    import ray

    return ray.available_resources().get("CPU", 0.0)


def with_resources(run, **settings):
    return replace(run, config=replace(run.config, resources=replace(run.config.resources, **settings)))


def consume(run, world_size, **options):
    """Every rank's steps or error, each rank on a thread of its own."""
    stream = Stream.open(run, run.start().cursors, world_size, **options)

    def rank_of(rank):
        loader = Loader(run.config, rank=rank, world_size=world_size, run=run, connect=lambda *_: stream)
        try:
            return list(loader.steps())
        except IngestError as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(rank_of, range(world_size)))


def digests(ranks):
    """The digest of each global batch."""
    return [format(sum(map(step_digest, parts)) % 2**64, "016x") for parts in zip(*ranks, strict=True)]


def digests_of(expected):
    return [line["digest"] for line in lines_of(expected)]


class Rerouted:
    """A stream that delivers to a rank what another one should get."""

    def __init__(self, stream, world_size):
        self._stream, self._world_size = stream, world_size

    def slabs(self, rank):
        return self._stream.slabs((rank + 1) % self._world_size)

    def leave(self, rank):
        self._stream.leave((rank + 1) % self._world_size)

    def standing(self):
        return []


def test_ranks_that_get_each_others_slabs_stop_before_the_first_batch(run, shared_ray):
    stream = Rerouted(Stream.open(run, run.start().cursors, 2), 2)
    loaders = [Loader(run.config, rank=rank, world_size=2, run=run, connect=lambda *_: stream) for rank in range(2)]

    def first(loader):
        with pytest.raises(OrderError) as caught:
            next(loader.steps())
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        lines = list(pool.map(first, loaders))
    assert lines == [
        f"rank {rank} of 2 must get its slab of window 0 next; got that of rank {1 - rank} of 2 of window 0: "
        "resume from the last checkpoint"
        for rank in range(2)
    ]


class SplitWindow:
    """What would come if Ray cut a window's blocks: each slab as two of half the rows."""

    def __init__(self, run):
        self._run = run

    def slabs(self, rank):
        for spec in self._run.specs(self._run.start().cursors):
            for slab in self._run.maker(spec).slabs(1):
                half = len(slab.rows) // 2
                yield replace(slab, rows=slab.rows.slice(0, half))
                yield replace(slab, rows=slab.rows.slice(half, len(slab.rows)))

    def leave(self, rank):
        pass

    def standing(self):
        return []


def test_a_window_that_ray_would_split_is_caught(run):
    with pytest.raises(OrderError, match=r"must get its slab of window 0 next; got .* rows of it"):
        next(Loader(run.config, run=run, connect=lambda *_: SplitWindow(run)).steps())


@pytest.mark.parametrize("world_size", [1, 2])
def test_leg_boundaries_change_nothing(run, expected, shared_ray, world_size):
    assert expected[-1].position.window + 1 == 6
    assert digests(consume(run, world_size, leg_windows=4)) == digests_of(expected)


def test_a_file_deleted_after_the_index_is_named_to_every_rank(run, shared_ray, tmp_path, tokenizer_file):
    gone = write_corpus(tmp_path / "corpus", texts(40, seed=6), files=2)[1]
    config = write_config(tmp_path / "run.yaml", tokenizer={"path": str(tokenizer_file)})
    prepared = Run.prepare(IngestConfig.from_yaml(config))
    gone.unlink()
    began = time.monotonic()
    for error in consume(prepared, 2):
        assert isinstance(error, StorageError)
        assert str(gone) in str(error)
        assert "\n" not in str(error)
    assert time.monotonic() - began < 30


def test_a_file_damaged_after_the_index_is_named_as_data_at_fault(shared_ray, tmp_path, tokenizer_file):
    broken = write_corpus(tmp_path / "corpus", texts(40, seed=6), files=2)[1]
    config = write_config(tmp_path / "run.yaml", tokenizer={"path": str(tokenizer_file)})
    prepared = Run.prepare(IngestConfig.from_yaml(config))
    content = bytearray(broken.read_bytes())
    content[60:120] = bytes(60)
    broken.write_bytes(content)
    with pytest.raises(DataError, match="cannot be decoded") as caught:
        drain(prepared, 2)
    assert str(broken) in str(caught.value)
    until(lambda: free_cpus() == CPUS, 10, "the CPUs come free after an error")


def test_an_actor_killed_in_mid_window_changes_nothing(long_run, long_expected, shared_ray):
    killed, got = [], []
    loader = Loader(long_run.config, run=long_run)
    for step in loader.steps():
        got.append(step)
        if len(killed) < 2 and step.position.window >= len(killed):
            [pid] = until(lambda: set(ray_processes("ray::MapWorker")) - set(killed), 30, "an actor works")
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    assert len(killed) == 2
    assert got[-1].position.window > 8
    assert digests([got]) == digests_of(long_expected)


def test_a_killed_server_is_an_error_within_seconds(long_run, shared_ray):
    steps = Loader(long_run.config, run=long_run).steps()
    next(steps)
    [pid] = ray_processes("ray::_Server")
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(ResourceError, match="Ray must deliver the next slab; got "):
        list(steps)
    assert time.monotonic() - began < 30
    until(lambda: free_cpus() == CPUS, 10, "the CPUs come free")


def test_leaving_the_loop_frees_the_cpus_and_a_second_loader_goes_on(run, long_run, long_expected, shared_ray):
    every_cpu = with_resources(long_run, tokenize_actors=CPUS)
    loader = Loader(every_cpu.config, run=every_cpu)
    for batch in loader:
        if batch.position.step == 3:
            break
    until(lambda: free_cpus() == CPUS, 10, "the CPUs come free")
    until(lambda: not ray_processes("ray::MapWorker"), 10, "the actors end")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ingest-rank")]
    second = Loader(every_cpu.config, run=every_cpu)
    second.load_state_dict(loader.state_dict())
    with second:
        assert next(iter(second)).position == long_expected[3].position


def test_an_impossible_number_of_actors_is_refused_at_once_with_the_numbers(shared_ray):
    until(lambda: free_cpus() == CPUS, 10, "the streams before it have ended")
    began = time.monotonic()
    with pytest.raises(ResourceError) as caught:
        require_resources(ResourcesConfig(tokenize_actors=6), extra_cpus=2)
    assert time.monotonic() - began < 2
    assert str(caught.value).startswith(
        "the job must fit the cluster; needs 8 CPUs (6 tokenization actors of 1 CPUs and 2 for trainers), "
        "the cluster has 4 CPUs in all, 4 free, the largest node 4: set resources.tokenize_actors to [2, 2], "
    )


def test_an_actor_larger_than_the_largest_node_is_refused_at_once(run, shared_ray):
    too_large = with_resources(run, cpus_per_actor=8.0)
    began = time.monotonic()
    with pytest.raises(ResourceError, match=r"add CPUs or lower resources\.cpus_per_actor"):
        next(Loader(too_large.config, run=too_large).steps())
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("settings", [{"tokenize_actors": 4}, {"tokenize_actors": 1, "cpus_per_actor": 4.0}])
def test_actors_that_take_every_cpu_do_not_hang(run, expected, shared_ray, settings):
    figures, end = drain(with_resources(run, **settings), 2)
    assert end.to_json() == expected[-1].position.to_json()
    assert figures["steps"] == len(expected)


def test_a_stream_that_finds_no_free_cpu_is_refused_with_the_numbers(long_run, shared_ray):
    import ray

    @ray.remote(num_cpus=CPUS)
    class Other:
        def ready(self):
            return True

    other = Other.remote()
    ray.get(other.ready.remote())
    with pytest.raises(ResourceError, match="the cluster has 4 CPUs in all, 0 free"):
        next(Loader(long_run.config, run=long_run).steps())


def test_one_cpu_in_all_is_enough_for_one_actor(run, expected, no_ray):
    start_ray(1)
    with Loader(run.config, run=run) as loader:
        assert digests([list(loader.steps())]) == digests_of(expected)


def test_windows_larger_than_the_cluster_are_refused_with_the_size_that_fits(run, shared_ray):
    require_memory(run)
    shuffle = replace(run.config.shuffle, window_tokens=10**13)
    with pytest.raises(ResourceError) as caught:
        require_memory(replace(run, config=replace(run.config, shuffle=shuffle)))
    told = re.search(r"must fit the cluster's \w+; .* set shuffle.window_tokens to ([\d,]+)", str(caught.value))
    smaller = replace(shuffle, window_tokens=int(told[1].replace(",", "")))
    require_memory(replace(run, config=replace(run.config, shuffle=smaller)))


def deadly(texts_of_rows: list[str]) -> list[str]:
    """A transform that ends its process at one text, as a decoder's fault or a lack of memory would."""
    if "deadly" in texts_of_rows:
        os.kill(os.getpid(), signal.SIGKILL)
    return texts_of_rows


@pytest.mark.cluster
@pytest.mark.slow
def test_a_window_that_ends_every_actor_ends_the_run_with_its_files(tmp_path, tokenizer_file, no_ray):
    write_corpus(tmp_path / "d", [*texts(90, seed=6), "deadly", *texts(9, seed=7)], files=2, row_group_size=10)
    config = write_config(
        tmp_path / "run.yaml",
        sources=[{"name": "only", "path": "d", "transform": "tests.test_pipeline:deadly"}],
        tokenizer={"path": str(tokenizer_file), "backend": "tokenizers"},
        shuffle={"enabled": False, "window_tokens": 900},
    )
    start_ray(1)
    run = Run.prepare(IngestConfig.from_yaml(config))
    last = len(list(run.specs(run.start().cursors))) - 1
    with Loader(run.config, run=run) as loader, pytest.raises(DataError) as caught:
        list(loader.steps())
    rule = "a window must not end its actor; 5 ended in "
    assert re.search(rf"{rule}.*window {last} of \S*part-1\.parquet", str(caught.value))
