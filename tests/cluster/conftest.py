"""One head node for the tests of jobs, and a corpus with its undisturbed run."""

from __future__ import annotations

import pytest

from tests.cluster.heads import head_in
from tests.conftest import starting, texts, write_config, write_corpus


@pytest.fixture(scope="package")
def config(tmp_path_factory, tokenizer_file):
    """A run of 4 lanes with more than 60 steps."""
    folder = tmp_path_factory.mktemp("run")
    write_corpus(folder / "corpus", texts(300, seed=7, words=(20, 200)), files=3, row_group_size=20)
    return write_config(
        folder / "run.yaml",
        sources=[{"name": "only", "path": str(folder / "corpus")}],
        tokenizer={"path": str(tokenizer_file), "backend": "tokenizers"},
        packing={"sequence_length": 32},
        shuffle={"window_tokens": 4000},
    )


@pytest.fixture(scope="module")
def head(rays, tmp_path_factory):
    """A head node of 4 logical CPUs."""
    rays.stop()
    with starting(tmp_path_factory.mktemp("head")) as start, head_in(start, "--num-cpus=4") as head:
        yield head
