"""The loader on one rank, without Ray: slabs come from a stream of the test that makes them in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from ingest.config import IngestConfig, PackingConfig, ResourcesConfig, ShuffleConfig, SourceConfig, TokenizerConfig
from ingest.errors import ConfigError, DataError, OrderError, ResourceError, ResumeError
from ingest.lanes import step_digest
from ingest.loader import Loader
from ingest.position import Position
from ingest.run import Run
from ingest.slab import Slab
from tests.tiny import tokenizer_json, write_parquet

THREAD = "ingest-"


class LocalStream:
    """Makes the slabs of every rank in this process and notes what it was asked."""

    def __init__(self, run: Run, position: Position, world_size: int = 1) -> None:
        self.run, self.cursors, self.world_size = run, position.cursors, world_size
        self.served: list[int] = []
        self.left: list[int] = []

    def slabs(self, rank: int) -> Iterator[Slab]:
        for spec in self.run.specs(self.cursors):
            slab = list(self.run.maker(spec).slabs(self.world_size))[rank]
            self.served.append(slab.window)
            yield Slab.from_table(slab.to_table())

    def leave(self, rank: int) -> None:
        self.left.append(rank)

    def standing(self) -> list[str]:
        return []


class FailingStream(LocalStream):
    """Fails behind so many slabs."""

    count = 1

    def slabs(self, rank: int) -> Iterator[Slab]:
        yield from islice(super().slabs(rank), self.count)
        raise DataError("a.parquet is damaged: restore it")


class StandingStream(LocalStream):
    """Stands still behind one slab until it is left."""

    def __init__(self, run: Run, position: Position) -> None:
        super().__init__(run, position)
        self.go_on = threading.Event()

    def slabs(self, rank: int) -> Iterator[Slab]:
        yield from islice(super().slabs(rank), 1)
        self.go_on.wait()

    def leave(self, rank: int) -> None:
        super().leave(rank)
        self.go_on.set()

    def standing(self) -> list[str]:
        return ["window 1 is being made by process 7, for 60 s\nthread ingest-make:\n  in read"]


class Connector:
    """Opens a stream each time it is asked and keeps them all."""

    def __init__(self, kind: Callable[[Run, Position], LocalStream] = LocalStream) -> None:
        self.kind, self.streams = kind, []

    def __call__(self, run: Run, position: Position) -> LocalStream:
        self.streams.append(self.kind(run, position))
        return self.streams[-1]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """Files of 3, 4 and 5 documents and one without rows, over two epochs, about 3 windows an epoch."""
    folder: Path = tmp_path_factory.mktemp("loader")
    for name, count in (("a", 3), ("b", 4), ("c", 5), ("d", 0)):
        texts = [f"{name} {row} " + "the cat sat on the mat " * (row * 2 + 1) for row in range(count)]
        write_parquet(folder / f"data/{name}.parquet", texts, row_group_size=2)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    config = IngestConfig(
        sources=(SourceConfig(name="code", path=str(folder / "data")),),
        tokenizer=TokenizerConfig(path=str(folder / "tokenizer.json"), backend="tokenizers"),
        packing=PackingConfig(sequence_length=8),
        shuffle=ShuffleConfig(window_tokens=200),
        lanes=4,
        global_batch_rows=8,
        epochs=2,
        resources=ResourcesConfig(prefetch_windows=4, stall_timeout_s=30),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INGEST_CACHE", str(folder / "cache"))
        return Run.prepare(config)


def with_resources(run: Run, **resources) -> IngestConfig:
    return replace(run.config, resources=replace(run.config.resources, **resources))


def loader_of(run: Run, connect: Connector | None = None, config: IngestConfig | None = None, **options) -> Loader:
    return Loader(config or run.config, run=run, connect=connect or Connector(), **options)


def restored(run: Run, state: dict, **options) -> Loader:
    loader = loader_of(run, **options)
    loader.load_state_dict(state)
    return loader


def digests(loader: Loader, count: int | None = None) -> list[int]:
    """The digests of the rows of the next steps."""
    with closing(loader.steps()) as steps:
        return [step_digest(step) for step in islice(steps, count)]


def feeders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD)]


def soon(holds: Callable[[], bool], within_s: float = 10.0) -> bool:
    """Whether it holds before the deadline."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.005)
    return True


@pytest.fixture(scope="module")
def whole(run: Run) -> list[int]:
    """The digests of an uninterrupted run."""
    every = digests(loader_of(run))
    assert len(every) == 13
    return every


@pytest.fixture(scope="module")
def positions(run: Run) -> list[Position]:
    return [step.position for step in loader_of(run).steps()]


def test_batches_are_the_steps_with_their_positions(run: Run, positions: list[Position]) -> None:
    batches = list(loader_of(run))
    assert [batch.position for batch in batches] == positions
    assert {tuple(batch.input_ids.shape) for batch in batches} == {(8, 8)}


def test_iterating_again_goes_on_where_the_loop_was_left(run: Run, whole: list[int]) -> None:
    connect = Connector()
    loader = loader_of(run, connect)
    steps = []
    for count in (3, 1, 5, None):
        steps += [step_digest(step) for step in islice(loader.steps(), count)]
    assert steps == whole
    assert digests(loader) == []
    assert [stream.left for stream in connect.streams] == [[0]] * 5


@pytest.mark.parametrize("count", [1, 2, 7, 12])
def test_after_a_break_the_state_is_that_of_the_last_batch(run: Run, positions: list[Position], count: int) -> None:
    loader = loader_of(run)
    for number, batch in enumerate(loader, start=1):
        assert loader.position == batch.position == positions[number - 1]
        if number == count:
            break
    assert loader.state_dict() == positions[count - 1].to_dict()


@pytest.mark.parametrize("batches", [False, True], ids=["steps", "batches"])
def test_the_state_inside_the_loop_does_not_move_with_the_reading_ahead(
    run: Run, positions: list[Position], batches: bool
) -> None:
    connect = Connector()
    loader = loader_of(run, connect, with_resources(run, prefetch_windows=1000, prefetch_batches=100))
    iterator = iter(loader) if batches else loader.steps()
    next(iterator)
    ends = positions[-1].window
    assert soon(lambda: connect.streams[0].served[-1] == ends)
    assert loader.state_dict() == positions[0].to_dict()
    loader.close()


@pytest.mark.parametrize("prefetch_windows", [1, 4, 1000])
def test_a_save_after_step_k_goes_on_with_step_k_plus_1_however_deep_the_prefetch(
    run: Run, whole: list[int], prefetch_windows: int
) -> None:
    config = with_resources(run, prefetch_windows=prefetch_windows)
    for count in (1, 6, 11):
        loader = loader_of(run, config=config)
        before = digests(loader, count)
        assert before + digests(restored(run, loader.state_dict(), config=config)) == whole


def test_a_second_and_a_third_resume_continue_the_stream(run: Run, whole: list[int]) -> None:
    state, steps = loader_of(run).state_dict(), []
    for count in (2, 3, 4, None):
        loader = restored(run, state)
        steps += digests(loader, count)
        state = loader.state_dict()
    assert steps == whole


def test_a_save_at_the_end_of_an_epoch_neither_skips_nor_replays_one(
    run: Run, whole: list[int], positions: list[Position]
) -> None:
    last_of_first = max(n for n, position in enumerate(positions) if position.cursors.sources[0].epoch == 0)
    for count in (last_of_first, last_of_first + 1, last_of_first + 2):
        loader = loader_of(run)
        assert digests(loader, count) == whole[:count]
        assert digests(restored(run, loader.state_dict())) == whole[count:]


def test_a_save_at_the_end_of_the_stream_yields_nothing_more(run: Run, positions: list[Position]) -> None:
    loader = restored(run, positions[-1].to_dict())
    assert digests(loader) == []
    assert loader.position == positions[-1]


def test_a_resume_opens_the_stream_at_the_window_of_the_position(run: Run, positions: list[Position]) -> None:
    connect = Connector()
    digests(restored(run, positions[-1].to_dict(), connect=connect))
    assert connect.streams[0].served[0] == positions[-1].window


def test_two_ranks_hand_out_the_global_batches_of_one(run: Run, whole: list[int], positions: list[Position]) -> None:
    connect = Connector(lambda run, position: LocalStream(run, position, world_size=2))
    ranks = [list(loader_of(run, connect, rank=rank, world_size=2).steps()) for rank in (0, 1)]
    sums = [sum(map(step_digest, steps)) % 2**64 for steps in zip(*ranks, strict=True)]
    assert sums == whole
    assert [step.position for step in ranks[1]] == positions


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 3), (0, 8)])
def test_a_rank_or_world_size_that_does_not_fit_is_refused(run: Run, rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError):
        loader_of(run, rank=rank, world_size=world_size)


def test_loading_a_state_during_iteration_is_refused(run: Run, positions: list[Position]) -> None:
    loader = loader_of(run)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ResumeError, match="load_state_dict must come before iterating"):
        loader.load_state_dict(positions[5].to_dict())
    assert loader.position == positions[0]
    loader.close()
    loader.load_state_dict(positions[5].to_dict())
    assert loader.position == positions[5]


def test_leaving_the_loop_leaves_the_stream_at_once(run: Run, positions: list[Position]) -> None:
    connect = Connector()
    loader = loader_of(run, connect)
    for _ in loader:
        break
    assert connect.streams[0].left == [0]
    loader.load_state_dict(positions[3].to_dict())


def test_an_iterator_that_was_replaced_does_not_close_the_one_that_runs(run: Run, whole: list[int]) -> None:
    loader = loader_of(run)
    old = iter(loader)
    next(old)
    current = loader.steps()
    assert step_digest(next(current)) == whole[1]
    del old
    assert [step_digest(step) for step in current] == whole[2:]


def test_a_state_of_other_settings_is_refused_and_the_position_stays(run: Run, positions: list[Position]) -> None:
    loader = loader_of(run)
    state = positions[3].to_dict()
    state["fingerprint"] = {**state["fingerprint"], "lanes": 8}
    with pytest.raises(ResumeError, match="lanes: 8 then, 4 now"):
        loader.load_state_dict(state)
    assert loader.position == run.start()


def test_a_state_that_is_none_is_refused(run: Run) -> None:
    with pytest.raises(ResumeError, match="position must have the fields"):
        loader_of(run).load_state_dict({})


def test_closing_leaves_the_stream_once_however_often(run: Run, positions: list[Position]) -> None:
    connect = Connector()
    loader = loader_of(run, connect)
    loader.close()
    iterator = loader.steps()
    next(iterator)
    loader.close()
    loader.close()
    assert connect.streams[0].left == [0]
    assert list(iterator) == []
    assert loader.position == positions[0]


def test_a_context_manager_closes_also_on_an_error(run: Run) -> None:
    connect = Connector()

    def fail() -> None:
        with loader_of(run, connect) as loader:
            next(loader.steps())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert connect.streams[0].left == [0]


def test_an_error_of_the_stream_is_raised_behind_the_batches_before_it(run: Run) -> None:
    connect = Connector(FailingStream)
    loader, seen = loader_of(run, connect), []
    with pytest.raises(DataError, match=r"^a.parquet is damaged: restore it$"):
        seen += loader.steps()
    assert loader.position.window == 0
    assert loader.position.step > 0
    assert connect.streams[0].left == [0]


def test_after_an_error_the_loader_goes_on_from_the_last_batch(run: Run, whole: list[int]) -> None:
    kinds = [FailingStream, LocalStream]
    loader = loader_of(run, Connector(lambda run, position: kinds.pop(0)(run, position)))
    steps = []
    with pytest.raises(DataError):
        steps.extend(map(step_digest, loader.steps()))
    assert 0 < len(steps) < len(whole)
    assert steps + digests(loader) == whole


def test_a_connection_that_fails_leaves_the_loader_usable(run: Run, positions: list[Position]) -> None:
    def refuse(run: Run, position: Position) -> LocalStream:
        raise ResourceError("no CPUs")

    loader = loader_of(run, refuse)
    with pytest.raises(ResourceError, match="no CPUs"):
        next(iter(loader))
    loader.load_state_dict(positions[2].to_dict())


def test_a_stream_that_stands_still_is_an_error_that_names_the_setting_and_all_stacks(run: Run, caplog) -> None:
    connect = Connector(StandingStream)
    loader = loader_of(run, connect, with_resources(run, stall_timeout_s=0.2))
    with pytest.raises(ResourceError) as caught:
        list(loader.steps())
    assert str(caught.value) == (
        "rank 0 must get a slab within resources.stall_timeout_s; got none for 0.2 s, the last was that of window 0; "
        "window 1 is being made by process 7, for 60 s: let all ranks iterate at the same time, see the stacks in the "
        "log, or raise the limit"
    )
    [said] = [record.getMessage() for record in caplog.records if record.name == "ingest"]
    assert said.startswith("ingest-rank-0 has waited 0 s; rank 0 must get a slab within resources.stall_timeout_s; ")
    assert "\nthread MainThread:\n" in said
    assert said.endswith("window 1 is being made by process 7, for 60 s\nthread ingest-make:\n  in read")
    assert connect.streams[0].left == [0]
    assert soon(lambda: not feeders())


def test_a_stream_that_ends_early_is_an_order_error(run: Run) -> None:
    class Short(LocalStream):
        def slabs(self, rank: int) -> Iterator[Slab]:
            return islice(super().slabs(rank), 1)

    with pytest.raises(OrderError, match="rank 0 of 1 must get its slab of window 1 next; got the end"):
        digests(loader_of(run, Connector(Short)))


def test_no_more_slabs_are_pulled_than_the_settings_allow(run: Run) -> None:
    connect = Connector()
    iterator = loader_of(run, connect, with_resources(run, prefetch_windows=2)).steps()
    next(iterator)
    most = 1 + 2 + 1  # the open window, the queue, and the one in the feeder's hand
    assert soon(lambda: len(connect.streams[0].served) == most)
    assert not soon(lambda: len(connect.streams[0].served) > most, within_s=0.05)
    iterator.close()


def test_total_tokens_end_the_stream_and_stay_at_the_end(run: Run, positions: list[Position]) -> None:
    config = replace(run.config, epochs=None, total_tokens=positions[4].tokens)
    endless = replace(run, config=config)
    loader = Loader(config, run=endless, connect=Connector())
    tokens = [step.position.tokens for step in islice(loader.steps(), 9)]
    assert tokens == [position.tokens for position in positions[:5]]
    assert next(loader.steps(), None) is None


def test_waits_are_measured_after_the_first_batch(run: Run) -> None:
    loader = loader_of(run)
    digests(loader)
    timing = loader.timing
    assert timing.first_batch_s > 0
    assert 0 <= timing.wait_s <= timing.elapsed_s
    assert 0 <= timing.wait_share <= 1


def test_the_feeder_ends_when_the_loop_is_left(run: Run) -> None:
    loader = loader_of(run, config=with_resources(run, prefetch_windows=1))
    assert soon(lambda: not feeders())
    iterator = iter(loader)
    next(iterator)
    assert {thread.name for thread in feeders()} >= {"ingest-rank-0", "ingest-prefetch"}
    loader.close()
    assert soon(lambda: not feeders())


def test_thirty_short_epochs_leave_no_thread_behind(run: Run) -> None:
    before = threading.active_count()
    for _ in range(30):
        loader = loader_of(run)
        assert len(list(islice(loader, 2))) == 2
        loader.close()
    assert soon(lambda: threading.active_count() <= before)
