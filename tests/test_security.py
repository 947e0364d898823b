"""What listens, what is executed, and where a secret could end up. Pickles in checkpoints: test_checkpoint.py."""

import base64
import json
import tempfile
from pathlib import Path

import pytest
import yaml

import ingest
from ingest.storage import Storage
from jobs.pretrain import main
from tests.conftest import texts, write_config, write_corpus
from tests.weed import KEYS

LISTENERS = """
import json, sys, psutil
import ingest
from ingest.cluster import ensure_ray

with ingest.Loader(ingest.IngestConfig.from_yaml(sys.argv[1])) as loader:
    next(iter(loader))
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    names = {process.pid: process.name() for process in processes}
    sockets = [each for each in psutil.net_connections("inet") if each.status == "LISTEN" and each.pid in names]
    print(json.dumps([[names[each.pid], each.laddr.ip] for each in sockets]))
"""


@pytest.fixture
def config(tmp_path, tokenizer_file):
    write_corpus(tmp_path / "corpus", texts(40, seed=1))
    return write_config(tmp_path / "run.yaml", tokenizer={"path": str(tokenizer_file), "backend": "tokenizers"})


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_local_ray_listens_on_loopback_alone(config, no_ray, started):
    done = started("-c", LISTENERS, config, RAY_ADDRESS="local").wait(200)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert {"gcs_server", "raylet"} <= {name for name, _ in found}
    assert [(name, ip) for name, ip in found if ip.removeprefix("::ffff:") != "127.0.0.1"] == []


def holding(folder, secret):
    """Files below a folder that hold a secret, as it is or in base64."""
    needles = [secret.encode(), base64.b64encode(secret.encode())]
    files = [path for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 3
    return [path for path in files if any(needle in path.read_bytes() for needle in needles)]


def test_the_search_for_secrets_finds_one(tmp_path):
    for name, text in {"a": "nothing", "b": "x hunter2 y", "c": "x aHVudGVyMg== y", "d": ""}.items():
        (tmp_path / name).write_text(text)
    assert holding(tmp_path, "hunter2") == [tmp_path / "b", tmp_path / "c"]


@pytest.mark.ray
@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_training_run_on_s3_writes_its_secret_nowhere(s3_endpoint, no_ray, started, tokenizer_file, tmp_path):
    store = Storage(ingest.config.StorageConfig(endpoint=s3_endpoint, region="us-east-1"))
    [corpus] = write_corpus(tmp_path / "corpus", texts(60, seed=1))
    store.write_bytes("s3://data/secrets/corpus/part.parquet", corpus.read_bytes())
    config = write_config(
        tmp_path / "run.yaml",
        sources=[{"name": "only", "path": "s3://data/secrets/corpus"}],
        tokenizer={"path": str(tokenizer_file), "backend": "tokenizers"},
        storage={"endpoint": s3_endpoint, "region": "us-east-1"},
        manifest="s3://data/secrets/manifest.json.gz",
    )
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="rs-") as logs:  # short: Ray's sockets lie in it
        job = ["-m", "jobs.pretrain", "--config", config, "--storage", tmp_path / "runs", "--name", "run"]
        options = ["--max-steps", "3", "--checkpoint-every", "2"]
        done = started(*job, *options, RAY_ADDRESS="local", RAY_TMPDIR=logs).wait(200)
        assert done.code == 0, done.err
        assert any(path.name.startswith("worker") for path in Path(logs).rglob("*.err"))
        secret = KEYS["AWS_SECRET_ACCESS_KEY"]
        assert holding(logs, secret) == []
    assert list((tmp_path / "runs").rglob("position.json"))
    assert holding(tmp_path, secret) == []
    assert secret.encode() not in store.read_bytes("s3://data/secrets/manifest.json.gz")


def test_a_storage_that_holds_a_credential_is_refused_without_showing_it(config, capsys):
    storage = "s3://key:hunter2@bucket/runs"
    assert main(["--config", str(config), "--storage", storage, "--name", "run"]) == 2
    said = capsys.readouterr()
    assert said.err == (
        "ConfigError: --storage must not hold a credential; got a s3:// path that does: put it in the environment\n"
    )
    assert "hunter2" not in said.out


def test_yaml_that_would_run_code_is_refused_before_it_does(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"lanes: !!python/object/apply:os.mkdir [{tmp_path}/ran]")
    with pytest.raises(ingest.ConfigError, match=r"run\.yaml"):
        ingest.IngestConfig.from_yaml(path)
    assert not (tmp_path / "ran").exists()
    yaml.unsafe_load(path.read_text())  # it is code indeed
    assert (tmp_path / "ran").exists()


def test_a_position_that_is_no_position_or_too_large_is_refused_before_it_is_used():
    for text, rule in {
        "[" * 100_000: "position must be JSON",
        '{"step": 3}': "position must have the fields that state_dict",
        " " * (2 << 20): "position must be under 1048576 bytes",
    }.items():
        with pytest.raises(ingest.ResumeError, match=rule):
            ingest.Position.from_json(text)
