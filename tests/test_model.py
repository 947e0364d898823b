from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from ingest.attention import document_mask
from ingest.batch import Batch
from ingest.slab import Rows
from jobs.model import GPT, GPTConfig, loss_sum
from jobs.step import micro_rows, train_step

SMALL = GPTConfig(vocab_size=32, num_layers=2, num_heads=2, width=16)


def batch_of(tokens, segments):
    lengths = np.array([length for row in segments for length in row], dtype=np.int32)
    counts = np.array([len(row) for row in segments], dtype=np.int32)
    return Batch.from_rows(Rows(np.array(tokens, dtype=np.uint16), lengths, counts), position=None)


def attend_within(batch):
    return partial(scaled_dot_product_attention, attn_mask=document_mask(batch))


def logits_of(model, batch):
    with torch.no_grad():
        return model(batch.input_ids, batch.position_ids, attend_within(batch))


@pytest.fixture
def model():
    """In float64, with weights large enough that every input shows in the logits."""
    model = GPT(SMALL).double()
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(10 if weights.ndim == 2 else 1)
    return model


def test_a_document_sees_nothing_of_the_one_before_it_in_its_row(model):
    one = batch_of([[1, 2, 3, 7, 8, 9, 10, 11, 0]], [[3, 5]])
    other = batch_of([[4, 5, 6, 7, 8, 9, 10, 11, 0]], [[3, 5]])
    assert torch.equal(logits_of(model, one)[:, 3:], logits_of(model, other)[:, 3:])
    assert not torch.allclose(logits_of(model, one)[:, :3], logits_of(model, other)[:, :3])


def test_without_the_document_mask_it_would_see_it(model):
    one = batch_of([[1, 2, 3, 7, 8, 9, 10, 11, 0]], [[8]])
    other = batch_of([[4, 5, 6, 7, 8, 9, 10, 11, 0]], [[8]])
    assert not torch.allclose(logits_of(model, one)[:, 3:], logits_of(model, other)[:, 3:])


def test_a_document_gets_the_same_logits_wherever_it_stands_in_a_row(model):
    second = logits_of(model, batch_of([[1, 2, 3, 7, 8, 9, 10, 11, 0]], [[3, 5]]))[:, 3:]
    first = logits_of(model, batch_of([[7, 8, 9, 10, 11, 0, 0, 0, 0]], [[5]]))[:, :5]
    torch.testing.assert_close(second, first, rtol=0, atol=1e-12)


def test_a_token_sees_its_position(model):
    batch = batch_of([[7, 7, 7, 1, 7, 7, 7, 7, 0]], [[8]])
    moved = model(batch.input_ids, batch.position_ids.flip(1), attend_within(batch))
    assert not torch.allclose(logits_of(model, batch), moved)


def test_a_token_sees_no_later_one(model):
    one, other = batch_of([[1, 2, 3, 4, 5]], [[4]]), batch_of([[1, 2, 3, 9, 5]], [[4]])
    assert torch.equal(logits_of(model, one)[:, :3], logits_of(model, other)[:, :3])


def test_a_batch_of_padding_has_loss_zero_no_labels_and_no_nan(model):
    loss, count = loss_sum(model, batch_of([[0, 0, 0], [0, 0, 0]], [[], []]))
    loss.backward()
    assert (loss.item(), count) == (0.0, 0)
    assert all(weights.grad is not None and not weights.grad.any() for weights in model.parameters())


def test_padding_in_a_batch_leaves_the_loss_as_it_is(model):
    alone, count = loss_sum(model, batch_of([[1, 2, 3, 4]], [[4]]))
    padded, padded_count = loss_sum(model, batch_of([[1, 2, 3, 4], [0, 0, 0, 0]], [[4], []]))
    assert count == padded_count == 3
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-12)


def test_the_loss_is_the_cross_entropy_of_the_logits(model):
    batch = batch_of([[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 10, 11]], [[2, 3], [6]])
    loss, count = loss_sum(model, batch)
    picked = logits_of(model, batch).log_softmax(-1)[[0, 0, 0, 1, 1, 1, 1, 1], [0, 2, 3, 0, 1, 2, 3, 4]]
    by_hand = -sum(row[label] for row, label in zip(picked, [2, 4, 5, 7, 8, 9, 10, 11], strict=True))
    assert count == 8
    torch.testing.assert_close(loss, by_hand, rtol=0, atol=1e-10)


def test_micro_batches_add_up_to_the_loss_and_gradients_of_the_batch(model):
    batch = batch_of([[1, 2, 3, 4], [5, 6, 0, 0], [7, 8, 9, 1], [0, 0, 0, 0]], [[4], [2], [2, 2], []])
    loss, count = loss_sum(model, batch)
    loss.backward()
    whole = [weights.grad.clone() for weights in model.parameters()]
    model.zero_grad()
    parts = [loss_sum(model, micro) for micro in batch.split(1)]
    sum(part for part, _ in parts).backward()
    assert sum(number for _, number in parts) == count == 6
    torch.testing.assert_close(sum(part for part, _ in parts), loss, rtol=0, atol=1e-10)
    torch.testing.assert_close([weights.grad for weights in model.parameters()], whole, rtol=0, atol=1e-10)


def test_one_seed_gives_one_model_and_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = GPT(SMALL)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = GPT(SMALL)
    other = GPT(GPTConfig(vocab_size=32, num_layers=2, num_heads=2, width=16, seed=1))
    pairs = list(zip(one.state_dict().values(), again.state_dict().values(), strict=True))
    assert all(torch.equal(first, second) for first, second in pairs)
    assert not torch.equal(one.embedding.weight, other.embedding.weight)


def test_a_new_model_knows_nothing():
    torch.manual_seed(0)
    batch = batch_of([[1, 2, 3, 4, 5, 6, 7, 8, 9]], [[9]])
    loss, count = loss_sum(GPT(SMALL), batch)
    assert loss.item() / count == pytest.approx(np.log(32), abs=0.1)


def test_a_few_steps_learn_a_row_by_heart():
    model = GPT(SMALL)
    batch = batch_of([[1, 2, 3, 4, 5, 6, 7, 8, 9]], [[9]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(60):
        loss, count = loss_sum(model, batch)
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
    assert loss.item() / count < 0.1


def test_a_width_that_does_not_divide_into_heads_is_refused():
    with pytest.raises(ValueError, match="multiple of twice num_heads; got 20 and 4: set width to 128"):
        GPT(GPTConfig(vocab_size=32, num_heads=4, width=20))


UNEQUAL = [  # by step and rank: 8 labels and 1, then 3 and none
    ([[1, 2, 3, 4, 5, 6, 7, 8, 9]], [[9]]),
    ([[9, 8, 0, 0, 0, 0, 0, 0, 0]], [[2]]),
    ([[3, 1, 4, 1, 0, 0, 0, 0, 0]], [[4]]),
    ([[0, 0, 0, 0, 0, 0, 0, 0, 0]], [[]]),
]


def train_steps(model, batches, most_rows=4):
    """The losses that ``train_step`` gave; the weights are changed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return [train_step(model, optimizer, schedule, batch, most_rows) for batch in batches]


def joined(*batches):
    """Batches of one row each as one."""
    return batch_of([row for tokens, _ in batches for row in tokens], [row for _, rows in batches for row in rows])


@given(rows=st.integers(1, 200), most=st.integers(1, 200))
def test_micro_batches_divide_the_rows_and_are_as_large_as_they_may(rows, most):
    found = micro_rows(rows, most)
    assert found == [size for size in range(1, rows + 1) if rows % size == 0 and size <= most][-1]


@pytest.mark.parametrize("most_rows", [1, 2, 3])
def test_steps_in_micro_batches_lead_to_the_weights_of_steps_in_one_piece(most_rows):
    whole, parts = GPT(SMALL).double(), GPT(SMALL).double()
    steps = [joined(*UNEQUAL), joined(*reversed(UNEQUAL))]
    assert train_steps(parts, steps, most_rows) == pytest.approx(train_steps(whole, steps), abs=1e-10)
    torch.testing.assert_close(dict(parts.state_dict()), dict(whole.state_dict()), rtol=0, atol=1e-10)
    assert not torch.equal(whole.embedding.weight, GPT(SMALL).double().embedding.weight)


def test_no_micro_batch_holds_more_rows_than_it_may():
    model, seen = GPT(SMALL).double(), []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    train_steps(model, [joined(*UNEQUAL), joined(*UNEQUAL[:2])], most_rows=2)
    assert seen == [2, 2, 2]


def train_as_one_of_two_ranks(rank, folder):
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=2, timeout=timedelta(seconds=300))
    torch.set_num_threads(1)
    model = DistributedDataParallel(GPT(SMALL).double())
    losses = train_steps(model, [batch_of(*UNEQUAL[rank]), batch_of(*UNEQUAL[2 + rank])])
    losses += train_steps(model, [joined(UNEQUAL[rank], UNEQUAL[2 + rank])], most_rows=1)  # each rank in two parts
    torch.save((losses, model.module.state_dict()), folder / f"{rank}.pt")
    dist.barrier()  # a rank that leaves while another one is at work would end it
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_with_unequal_numbers_of_labels_train_on_the_mean_over_all_labels(tmp_path):
    torch.multiprocessing.spawn(train_as_one_of_two_ranks, (tmp_path,), nprocs=2)
    whole = GPT(SMALL).double()
    steps = [(UNEQUAL[0], UNEQUAL[1]), (UNEQUAL[2], UNEQUAL[3])]
    losses = train_steps(whole, [joined(*step) for step in steps])
    losses += train_steps(whole, [joined(*UNEQUAL)])

    fresh = GPT(SMALL).double()
    (eight, labels), (one, label) = (loss_sum(fresh, batch_of(*row)) for row in UNEQUAL[:2])
    assert (labels, label) == (8, 1)
    assert losses[0] == pytest.approx((eight.item() + one.item()) / 9, abs=1e-10)
    for rank in range(2):
        found, weights = torch.load(tmp_path / f"{rank}.pt")
        assert found == pytest.approx(losses, abs=1e-10)
        torch.testing.assert_close(weights, dict(whole.state_dict()), rtol=0, atol=1e-10)
