"""The main job with its model in shards: saved by two ranks, resumed by one, and by two again."""

import json

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.conftest import starting, steps_without_ray, write_job

# Ranks add gradients in another order than one process does, and AdamW divides small ones by their own size.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def config(tmp_path_factory, tokenizer_file):
    return write_job(tmp_path_factory.mktemp("parallel"), tokenizer_file, documents=100)


def until_step(step, config, folder, num_workers, parallel, name="run"):
    """Runs the job to a step, in a Ray of its own; returns position, directory and all weights of its checkpoint."""
    command = ["-m", "jobs.pretrain", "--config", config, "--storage", folder, "--name", name, "--parallel", parallel]
    with starting(folder) as start:
        job = start(*command, "--num-workers", num_workers, "--max-steps", step, RAY_ADDRESS="local")
        done = job.wait(200)
    assert (done.code, done.err) == (0, "")
    said = dict(line.split(None, 1) for line in done.out.splitlines())
    saved = folder / name / said["checkpoint"].rsplit("/", 1)[1]
    if parallel == "fsdp":
        dcp_to_torch_save(saved, saved / "model.pt")
    return json.loads((saved / "position.json").read_text()), saved, torch.load(saved / "model.pt")["model"]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*torch.distributed:UserWarning")
def test_shards_of_two_ranks_go_on_with_one_and_with_two_as_if_undisturbed(config, no_ray, tmp_path):
    expected = [step.position.to_dict() for step in steps_without_ray(config)[:30]]
    position, _, whole = until_step(30, config, tmp_path, 1, "ddp", name="whole")
    assert position == expected[29]
    for step, num_workers in ((10, 2), (20, 1), (30, 2)):
        position, saved, weights = until_step(step, config, tmp_path, num_workers, "fsdp")
        assert position == expected[step - 1]
        assert len(list(saved.glob("*.distcp"))) == num_workers
    assert weights.keys() == whole.keys()
    apart = max(float((weights[name] - whole[name]).abs().max()) for name in whole)
    print(f"weights at most {apart:.1e} apart")
    assert apart < TOLERANCE
