"""What a rank saves: copied before it is written, whole or in shards, and never more than data when it is read."""

import contextlib
import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.fsdp import fully_shard

import ingest
from ingest.checkpoint import Snapshot, _Index, restore

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*torch.distributed:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch.*"),
]


class Training:
    """Two layers of 4 x 6 and 6 x 2 weights, AdamW with a warm-up, and three steps on the same input."""

    def __init__(self, seed, sharded=False):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
        if sharded:
            for layer in self.model:
                fully_shard(layer)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: (step + 1) / 20)

    def parts(self):
        return self.model, self.optimizer, self.schedule

    def steps(self, count):
        for step in range(count):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 4) * (step + 1)).sum().backward()
            self.optimizer.step()
            self.schedule.step()

    def values(self):
        """Weights, moments, counts, rates: whole tensors by name."""
        found = {f"model.{name}": whole(tensor) for name, tensor in self.model.state_dict().items()}
        for number, moments in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{name}": whole(tensor) for name, tensor in moments.items()}
        found["lr"] = torch.tensor(self.optimizer.param_groups[0]["lr"])
        return {**found, "last_epoch": torch.tensor(self.schedule.last_epoch)}


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert len(one) == 4 + 4 * 3 + 2
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@contextlib.contextmanager
def world(folder, rank=0, size=1):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{size}", rank=rank, world_size=size)
    try:
        yield
        dist.barrier()  # a rank that leaves while another one is at work would end it
    finally:
        dist.destroy_process_group()


@pytest.fixture
def alone(tmp_path):
    """A world of this process; what is cached for it ends with it."""
    from ingest import checkpoint

    with world(tmp_path):
        yield
    checkpoint._writers.cache_clear()


def saved(training, folder, rank=0):
    """Copies, trains on, and only then writes."""
    folder.mkdir(exist_ok=True)
    before, snapshot = training.values(), Snapshot.take(rank, *training.parts())
    training.steps(2)
    assert not torch.equal(training.values()["model.0.weight"], before["model.0.weight"])
    snapshot.write(folder)
    return before


def test_training_that_goes_on_does_not_change_what_is_saved(tmp_path):
    training = Training(seed=1)
    training.steps(3)
    before = saved(training, tmp_path / "saved")
    assert {file.name for file in (tmp_path / "saved").iterdir()} == {"model.pt", "rng-0.pt"}
    other = Training(seed=2)
    restore(tmp_path / "saved", 0, *other.parts())
    assert_equal(other.values(), before)


def test_random_numbers_go_on_where_they_were(tmp_path):
    Snapshot.take(0, torch.nn.Linear(1, 1)).write(tmp_path)
    drawn = torch.rand(3)
    restore(tmp_path, 0, torch.nn.Linear(1, 1))
    assert torch.equal(torch.rand(3), drawn)


def save_in_shards(rank, size, folder):
    with world(folder, rank, size):
        training = Training(seed=1, sharded=True)
        training.steps(3)
        before = saved(training, folder / "saved", rank)
        torch.save(before, folder / f"before-{rank}.pt")


def restore_from_shards(rank, size, folder):
    with world(folder, rank, size):
        other = Training(seed=2, sharded=True)
        restore(folder / "saved", rank, *other.parts())
        assert_equal(other.values(), torch.load(folder / "before-0.pt"))
        other.steps(1)


@pytest.mark.slow
@pytest.mark.parametrize(("then", "now"), [(2, 1), (1, 2)])
def test_shards_of_a_number_of_ranks_are_restored_bit_for_bit_on_another(tmp_path, then, now):
    torch.multiprocessing.spawn(save_in_shards, (then, tmp_path), nprocs=then)
    shards = {f"__{rank}_0.distcp" for rank in range(then)}
    assert {file.name for file in (tmp_path / "saved").iterdir()} >= {".metadata", *shards}
    assert not (tmp_path / "saved" / "model.pt").exists()
    torch.multiprocessing.spawn(restore_from_shards, (now, tmp_path), nprocs=now)


def test_a_sharded_model_alone_is_restored_and_refuses_a_part_that_was_not_saved(tmp_path, alone):
    training = Training(seed=1, sharded=True)
    training.steps(3)
    before = saved(training, tmp_path / "saved")
    other = Training(seed=2, sharded=True)
    restore(tmp_path / "saved", 0, *other.parts())
    assert_equal(other.values(), before)
    (tmp_path / "less").mkdir()
    Snapshot.take(0, training.model).write(tmp_path / "less")
    with pytest.raises(ingest.ResumeError, match=r"must hold optimizer; got \['model'\]: save it too"):
        restore(tmp_path / "less", 0, *other.parts())
    with pytest.raises(
        ingest.ResumeError, match=r"must hold tensors and plain .* fit this model; got .*: use the model"
    ):
        restore(tmp_path / "less", 0, fully_shard(torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Linear(6, 2))))


def test_whole_and_sharded_models_refuse_each_other_in_words(tmp_path, alone):
    plain, sharded = torch.nn.Linear(2, 2), fully_shard(torch.nn.Linear(2, 2))
    for name, model in (("whole", plain), ("sharded", sharded)):
        (tmp_path / name).mkdir()
        Snapshot.take(0, model).write(tmp_path / name)
    with pytest.raises(ingest.ResumeError, match=r"checkpoint .*/whole must .* got a sharded model for a whole one: "):
        restore(tmp_path / "whole", 0, sharded)
    with pytest.raises(ingest.ResumeError, match="got a whole model for a sharded one: wrap the model as when"):
        restore(tmp_path / "sharded", 0, plain)


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return Path.touch, (Path(self._path),)


def test_an_index_of_shards_that_would_run_code_is_refused_before_it_does(tmp_path, alone):
    model = fully_shard(torch.nn.Linear(2, 2))
    Snapshot.take(0, model).write(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    with pytest.raises(ingest.ResumeError, match=r"must hold sizes and names alone; got pathlib\.Path\.touch"):
        restore(tmp_path, 0, model)
    assert not (tmp_path / "ran").exists()


class Attribute:
    """Pickles as what ``getattr`` gives."""

    def __init__(self, of, name):
        self._asked = of, name

    def __reduce__(self):
        return getattr, self._asked


def test_an_index_of_shards_may_name_a_member_of_an_enumeration_and_no_other_attribute(tmp_path, alone):
    member = pickle.dumps(Attribute(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    assert _Index(io.BytesIO(member)).load() is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    model = fully_shard(torch.nn.Linear(2, 2))
    Snapshot.take(0, model).write(tmp_path)
    for of, name in ((_MEM_FORMAT_ENCODING, "mro"), (torch.Size, "numel"), (2, "real")):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Attribute(of, name)))
        with pytest.raises(ingest.ResumeError, match=f"got an attribute '{name}' of "):
            restore(tmp_path, 0, model)


def test_a_value_beside_the_shards_that_would_run_code_is_refused_before_it_does(tmp_path, alone):
    training = Training(seed=1, sharded=True)
    training.steps(1)
    snapshot = Snapshot.take(0, *training.parts())
    snapshot.states["schedule"]["last_epoch"] = Touch(tmp_path / "ran")
    snapshot.write(tmp_path)
    with pytest.raises(ingest.ResumeError, match="Weights only load failed"):
        restore(tmp_path, 0, *training.parts())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["model.pt", "rng-0.pt"])
def test_a_file_of_tensors_that_would_run_code_is_refused_before_it_does(tmp_path, file):
    model = torch.nn.Linear(2, 2)
    Snapshot.take(0, model).write(tmp_path)
    torch.save({"model": Touch(tmp_path / "ran")}, tmp_path / file)
    with pytest.raises(ingest.ResumeError, match="Weights only load failed"):
        restore(tmp_path, 0, model)
    assert not (tmp_path / "ran").exists()
