"""Which cluster is joined: a note or an address that nobody answers at is found out in seconds, not minutes."""

from __future__ import annotations

import socket
import time

import pytest

from ingest.cluster import ensure_ray, running
from ingest.config import IngestConfig
from ingest.errors import ResourceError
from tests.conftest import write_config

pytestmark = pytest.mark.ray


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_the_note_of_a_cluster_that_is_gone_is_not_followed(tmp_path, monkeypatch, closed_port):
    (tmp_path / "ray").mkdir()
    note = tmp_path / "ray" / "ray_current_cluster"
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    note.write_text(f"127.0.0.1:{closed_port}")
    assert running() is None
    with socket.socket() as listener:
        listener.bind(("", 0))  # Ray makes 127.0.0.1 the address of the node
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        note.write_text(address)
        assert str(running()).endswith(address.removeprefix("127.0.0.1"))


def test_an_address_that_nobody_answers_at_is_refused_in_seconds(no_ray, tmp_path, monkeypatch, closed_port):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed_port}")
    config = IngestConfig.from_yaml(write_config(tmp_path / "run.yaml"))
    began = time.monotonic()
    with pytest.raises(ResourceError, match=f"running cluster; got 127.0.0.1:{closed_port}: start it, or set it to"):
        ensure_ray(config)
    assert time.monotonic() - began < 30
