"""How a model is spread over the workers: a copy on each (ddp), or each holds its shard of every layer (fsdp)."""

from __future__ import annotations

from ray.train.torch import prepare_model
from torch import nn
from torch.distributed.fsdp import fully_shard

from jobs.model import GPT

PARALLEL = ("ddp", "fsdp")


def spread(model: GPT, parallel: str) -> nn.Module:
    """The model on this worker's device, whose gradients are means over the workers.

    Args:
        model: built alike on every worker.
        parallel: one of ``PARALLEL``.
    """
    if parallel == "ddp":
        wrapped: nn.Module = prepare_model(model)
        return wrapped
    prepare_model(model, parallel_strategy=None)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model
