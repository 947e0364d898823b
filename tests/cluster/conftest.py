"""One head node for the tests of jobs, and a corpus with its undisturbed run."""

from __future__ import annotations

import pytest

from tests.cluster.heads import head_in
from tests.conftest import starting, write_job


@pytest.fixture(scope="package")
def config(tmp_path_factory, tokenizer_file):
    """A run of 4 lanes with more than 60 steps."""
    return write_job(tmp_path_factory.mktemp("run"), tokenizer_file)


@pytest.fixture(scope="module")
def head(rays, tmp_path_factory):
    """A head node of 4 logical CPUs."""
    rays.stop()
    with starting(tmp_path_factory.mktemp("head")) as start, head_in(start, "--num-cpus=4") as head:
        yield head
