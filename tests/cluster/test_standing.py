"""Streams that cannot go on, or hardly: an actor that stands still, an object store that others fill."""

import logging
import re
import time

import numpy as np
import pytest
import ray

from ingest.config import IngestConfig
from ingest.errors import ResourceError
from ingest.loader import Loader
from ingest.run import Run
from tests.conftest import steps_without_ray, texts, write_config, write_corpus

pytestmark = [pytest.mark.ray, pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

STORE = 75 << 20  # the smallest that Ray accepts


def test_an_actor_that_stands_still_is_named_with_its_window_its_stage_and_its_stack(
    shared_ray, tmp_path, tokenizer_file, caplog
):
    gate = tmp_path / "gate"
    write_corpus(tmp_path / "corpus", [f"{gate} {text}" for text in texts(60)])
    source = {"name": "only", "path": "corpus", "transform": "tests.standing:while_its_gate_is_there"}
    tokenizer = {"path": str(tokenizer_file), "backend": "tokenizers"}
    resources = {"tokenize_actors": 1, "stall_timeout_s": 45}
    path = write_config(tmp_path / "run.yaml", sources=[source], tokenizer=tokenizer, resources=resources)
    run = Run.prepare(IngestConfig.from_yaml(path))
    gate.touch()
    try:
        with pytest.raises(ResourceError) as caught:
            next(Loader(run.config, run=run).steps())
    finally:
        gate.unlink()
    line = r"window 0 is being made by process \d+ of node [0-9a-f]{8}, last stage ended: read, for (15|30) s"
    assert re.search(f"got none for 45 s, the last was none yet; {line}", str(caught.value)), caught.value
    said = "\n".join(record.getMessage() for record in caplog.records if record.name == "ingest")
    assert re.search(f"{line}(?s:.*)\nthread ingest-make:\n(?s:.*), in while_its_gate_is_there", said)
    assert "thread ingest-rank-0:\n" in said


@pytest.fixture
def small_ray(no_ray):
    """Starts a Ray whose object store is as small as may be; without a spill it may not write to the disk."""

    def start(spill):
        config = {} if spill else {"local_fs_capacity_threshold": 0.0}
        quiet = {"include_dashboard": False, "logging_level": logging.WARNING, "log_to_driver": False}
        ray.init(address="local", num_cpus=4, object_store_memory=STORE, _system_config=config, **quiet)

    return start


@pytest.mark.parametrize("spill", [True, False], ids=["and spills", "and the disk is full"])
def test_a_store_that_another_user_fills_while_the_trainer_is_slow_changes_no_step(
    small_ray, tmp_path, tokenizer_file, spill
):
    write_corpus(tmp_path / "corpus", texts(1000, seed=5, words=(500, 1500)), files=4, row_group_size=10)
    tokenizer = {"path": str(tokenizer_file), "backend": "tokenizers"}
    settings = {"packing": {"sequence_length": 512}, "shuffle": {"window_tokens": 100_000}}
    path = write_config(tmp_path / "run.yaml", tokenizer=tokenizer, **settings)
    small_ray(spill)
    got, kept, refused = [], [], []
    with Loader(IngestConfig.from_yaml(path)) as loader:
        for step in loader.steps():
            got.append(step.position)
            time.sleep(0.02)  # the trainer's work
            if len(got) % 10 == 0 and not refused:
                try:
                    kept.append(ray.put(np.zeros(20_000_000, np.uint8)))
                except ray.exceptions.OutOfDiskError as error:  # the other user's, in words
                    refused.append(str(error))
            if len(got) == 200:
                break
    assert got == [step.position for step in steps_without_ray(path, count=200)]
    assert (len(kept), bool(refused)) == (20, False) if spill else (3, True)
