"""Streams that cannot go on, or hardly: an actor that stands still, an object store that others fill."""

import re

import pytest

from ingest.config import IngestConfig
from ingest.errors import ResourceError
from ingest.loader import Loader
from ingest.run import Run
from tests.conftest import texts, write_config, write_corpus

pytestmark = [pytest.mark.ray, pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

STORE = 75 << 20  # the smallest that Ray accepts


def test_an_actor_that_stands_still_is_named_with_its_window_its_stage_and_its_stack(
    shared_ray, tmp_path, tokenizer_file, caplog
):
    gate = tmp_path / "gate"
    write_corpus(tmp_path / "corpus", [f"{gate} {text}" for text in texts(60)])
    source = {"name": "only", "path": "corpus", "transform": "tests.standing:while_its_gate_is_there"}
    tokenizer = {"path": str(tokenizer_file), "backend": "tokenizers"}
    resources = {"tokenize_actors": 1, "stall_timeout_s": 30}
    path = write_config(tmp_path / "run.yaml", sources=[source], tokenizer=tokenizer, resources=resources)
    run = Run.prepare(IngestConfig.from_yaml(path))
    gate.touch()
    try:
        with pytest.raises(ResourceError) as caught:
            next(Loader(run.config, run=run).steps())
    finally:
        gate.unlink()
    line = r"window 0 is being made by process \d+ of node [0-9a-f]{8}, last stage ended: read, for [12]0 s"
    assert re.search(f"got none for 30 s, the last was none yet; {line}", str(caught.value)), caught.value
    said = "\n".join(record.getMessage() for record in caplog.records if record.name == "ingest")
    assert re.search(f"{line}(?s:.*)\nthread ingest-make:\n(?s:.*), in while_its_gate_is_there", said)
    assert "thread ingest-rank-0:\n" in said
