"""The main job with another loop: rank 0 writes [step, digest, workers, time] into the file ``trace`` of the run.

It ends at ``--max-steps``, or when ``stop`` lies there.
"""

import json
import sys
import time
from pathlib import Path

import ray.train
import torch

import ingest
from jobs.launch import check, fit
from jobs.mailbox import send_log
from jobs.pretrain import parse


def train(settings):
    send_log(settings["mailbox"])
    model, folder = torch.nn.Linear(2, 1), Path(ray.train.get_context().get_storage().experiment_fs_path)
    loader = ingest.train_loader(ingest.IngestConfig.from_dict(settings["config"]))
    ingest.restore_checkpoint(loader, model)
    rank, workers = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    with loader, (folder / "trace").open("a", buffering=1) as lines:
        for batch in loader:
            step = batch.position.step
            last = torch.tensor(float((folder / "stop").exists() or step == settings["max_steps"]))
            if workers > 1:
                torch.distributed.all_reduce(last)
            if rank == 0:
                lines.write(json.dumps([step, batch.position.digest, workers, time.time()]) + "\n")
            if last or step % settings["checkpoint_every"] == 0:
                ingest.save_checkpoint(loader, model)
            if last:
                break


if __name__ == "__main__":
    options = parse(None)
    fit(train, options, check(options))
    sys.exit(0)
