"""Settings: YAML there and back, paths from the file's directory, and one line for everything that is wrong."""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.config import (
    IngestConfig,
    PackingConfig,
    ResourcesConfig,
    ShuffleConfig,
    SourceConfig,
    StorageConfig,
    TokenizerConfig,
)
from ingest.errors import ConfigError

SMALLEST = {"sources": [{"name": "code", "path": "code/*.parquet"}], "tokenizer": {"path": "tokenizer.json"}}
FULL = """\
sources:
  - {name: code, path: "s3://bucket/code/*.parquet", text_column: body, weight: 0.7}
  - {name: web, path: [web/, "more/**/*.parquet"], weight: 0.3}
storage: {endpoint: "http://127.0.0.1:8333", region: us-east-1, max_attempts: 3, request_timeout_s: 5}
tokenizer: {path: tokenizer.json, eos_token: "</s>", backend: tokenizers}
packing: {sequence_length: 128, strategy: concat}
shuffle: {seed: 9223372036854775807, window_tokens: 8000000, enabled: false}
lanes: 4
global_batch_rows: 12
total_tokens: 1000000
resources: {tokenize_actors: [2, 3], cpus_per_actor: 0.5, prefetch_windows: 2, cluster_wait_s: 60, stall_timeout_s: 5}
manifest: run.manifest
"""


def with_setting(path: str, value: object) -> dict:
    """The smallest settings with one of them changed; ``...`` removes it."""
    plain: dict = copy.deepcopy(SMALLEST)
    inside = plain
    *folders, name = path.split(".")
    for folder in folders:
        inside = inside[int(folder)] if isinstance(inside, list) else inside.setdefault(folder, {})
    if value is ...:
        del inside[name]
    else:
        inside[name] = value
    return plain


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_defaults() -> None:
    config = IngestConfig.from_dict(SMALLEST)
    assert config == IngestConfig(
        sources=(SourceConfig(name="code", path="code/*.parquet"),), tokenizer=TokenizerConfig(path="tokenizer.json")
    )
    assert (config.lanes, config.global_batch_rows, config.num_epochs) == (8, 64, 1)
    assert (config.shuffle.window_tokens, config.shuffle.seed, config.shuffle.enabled) == ("auto", 0, True)
    assert (config.resources.min_actors, config.resources.max_actors) == (1, 8)
    assert config.sources[0].weight is None


def test_every_setting_is_read_from_yaml(tmp_path: Path) -> None:
    assert IngestConfig.from_yaml(write(tmp_path, FULL)) == IngestConfig(
        sources=(
            SourceConfig(name="code", path="s3://bucket/code/*.parquet", text_column="body", weight=0.7),
            SourceConfig(name="web", path=(f"{tmp_path}/web", f"{tmp_path}/more/**/*.parquet"), weight=0.3),
        ),
        storage=StorageConfig(
            endpoint="http://127.0.0.1:8333", region="us-east-1", max_attempts=3, request_timeout_s=5.0
        ),
        tokenizer=TokenizerConfig(path=f"{tmp_path}/tokenizer.json", eos_token="</s>", backend="tokenizers"),
        packing=PackingConfig(sequence_length=128, strategy="concat"),
        shuffle=ShuffleConfig(seed=2**63 - 1, window_tokens=8_000_000, enabled=False),
        lanes=4,
        global_batch_rows=12,
        total_tokens=1_000_000,
        resources=ResourcesConfig(
            tokenize_actors=(2, 3), cpus_per_actor=0.5, prefetch_windows=2, cluster_wait_s=60.0, stall_timeout_s=5.0
        ),
        manifest=f"{tmp_path}/run.manifest",
    )


def test_a_config_survives_yaml(tmp_path: Path) -> None:
    config = IngestConfig.from_yaml(write(tmp_path, FULL))
    assert IngestConfig.from_yaml(write(tmp_path, config.to_yaml())) == config
    assert IngestConfig.from_dict(config.to_dict()) == config


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
configs = st.builds(
    IngestConfig,
    sources=st.lists(names, min_size=1, max_size=3, unique=True).map(
        lambda every: tuple(SourceConfig(name=name, path=f"s3://bucket/{name}") for name in every)
    ),
    tokenizer=st.builds(TokenizerConfig, path=names, eos_token=names),
    shuffle=st.builds(
        ShuffleConfig,
        seed=st.integers(0, 2**63 - 1),
        window_tokens=st.one_of(st.just("auto"), st.integers(1, 10**12)),
        enabled=st.booleans(),
    ),
    resources=st.builds(ResourcesConfig, tokenize_actors=st.one_of(st.just((1, 4)), st.integers(1, 9))),
    lanes=st.sampled_from([1, 2, 4]),
    global_batch_rows=st.sampled_from([4, 8, 64]),
    epochs=st.one_of(st.none(), st.integers(1, 9)),
)


@given(configs)
@settings(max_examples=30, deadline=None)
def test_every_config_survives_plain_values(config: IngestConfig) -> None:
    assert IngestConfig.from_dict(config.to_dict()) == config


def test_relative_paths_start_from_the_directory_of_the_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path.parent)
    write(tmp_path, FULL)
    config = IngestConfig.from_yaml(f"{tmp_path.name}/run.yaml")
    assert config.tokenizer.path == str(tmp_path / "tokenizer.json")
    assert config.sources[1].paths[0] == str(tmp_path / "web")


@pytest.mark.parametrize("path", ["/data/code.parquet", "s3://bucket/code", "file:///data/code"])
def test_absolute_paths_and_uris_stay_as_they_are(path: str, tmp_path: Path) -> None:
    config = IngestConfig.from_dict(with_setting("sources.0.path", path), base=tmp_path)
    assert config.sources[0].paths == (path,)


def test_without_a_base_paths_stay_as_they_are() -> None:
    assert IngestConfig.from_dict(SMALLEST).tokenizer.path == "tokenizer.json"


def test_one_number_of_actors_is_both_fewest_and_most() -> None:
    assert (ResourcesConfig(tokenize_actors=3).min_actors, ResourcesConfig(tokenize_actors=3).max_actors) == (3, 3)


def test_total_tokens_leave_the_passes_open() -> None:
    config = IngestConfig.from_dict(SMALLEST)
    assert replace(config, total_tokens=5).num_epochs is None
    assert replace(config, epochs=3).num_epochs == 3


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        IngestConfig.from_dict(SMALLEST).lanes = 3  # type: ignore[misc]


BROKEN = [
    ("sources", [], r"sources must name at least one source; got \[\]"),
    ("sources.0.name", "", "sources.name must not be empty"),
    ("sources.0.path", "", "source code: path must not be empty"),
    ("sources.0.path", [], "source code: path must not be empty"),
    ("sources.0.weight", 0, "source code: weight must be between 0.000001 and 1000000; got 0"),
    ("sources.0.weight", -1, "weight must be between"),
    ("sources.0.weight", 1e7, "weight must be between"),
    ("sources.0.weight", float("nan"), "weight must be between"),
    ("sources", SMALLEST["sources"] * 2, r"sources.name must be unique; got \['code', 'code'\]: rename one"),
    ("storage.max_attempts", 0, "storage.max_attempts must be 1 to 100; got 0"),
    ("storage.max_attempts", 101, "storage.max_attempts must be 1 to 100"),
    ("storage.retry_deadline_s", -1, "storage.retry_deadline_s must be >= 0; got -1"),
    ("storage.max_requests", 0, "storage.max_requests must be 1 to 1024; got 0"),
    ("storage.max_requests", 1025, "storage.max_requests must be 1 to 1024"),
    ("storage.request_timeout_s", 0, "storage.request_timeout_s must be > 0"),
    ("packing.sequence_length", 1, "packing.sequence_length must be 2 to 16777216 tokens; got 1"),
    ("packing.sequence_length", 2**24 + 1, "packing.sequence_length must be"),
    ("shuffle.seed", -1, r"shuffle.seed must be 0 to 2\^63-1; got -1"),
    ("shuffle.seed", 2**63, "shuffle.seed must be"),
    ("shuffle.window_tokens", 0, "shuffle.window_tokens must be >= 1; got 0: try auto"),
    ("resources.tokenize_actors", 0, r"resources.tokenize_actors must be 1 <= min <= max; got \[0, 0\]"),
    ("resources.tokenize_actors", [3, 2], r"1 <= min <= max; got \[3, 2\]"),
    ("resources.cpus_per_actor", 0, "resources.cpus_per_actor must be 0.0001 to"),
    ("resources.cpus_per_actor", 1.5, "must be whole or below 1"),
    ("resources.prefetch_windows", 0, "resources.prefetch_windows must be 1 to 1024"),
    ("resources.cluster_wait_s", -1, "resources.cluster_wait_s must be >= 0"),
    ("resources.stall_timeout_s", 0, "resources.stall_timeout_s must be > 0"),
    ("lanes", 0, "lanes must be 1 to 65536; got 0"),
    ("lanes", 65537, "lanes must be 1 to 65536"),
    ("global_batch_rows", 60, "must be a multiple of lanes; got 60 and 8: set global_batch_rows to 64"),
    ("global_batch_rows", 3, "got 3 and 8: set global_batch_rows to 8"),
    ("global_batch_rows", 0, "got 0 and 8: set global_batch_rows to 8"),
    ("epochs", 0, "epochs must be >= 1; got 0"),
    ("total_tokens", 0, "total_tokens must be >= 1; got 0"),
]


@pytest.mark.parametrize(("path", "value", "words"), BROKEN, ids=[f"{path}={value}"[:40] for path, value, _ in BROKEN])
def test_a_broken_rule_is_one_line_with_the_setting_and_the_value(path: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        IngestConfig.from_dict(with_setting(path, value))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("lanes", "many", "^lanes: input should be a valid integer.*; got 'many': correct it$"),
        ("lanes", 2.5, "^lanes: input should be a valid integer.*; got 2.5"),
        ("lanes", None, "^lanes: input should be a valid integer; got None"),
        ("sources", {"name": "code"}, "^sources: input should be a valid tuple"),
        ("sources.0.path", 3, "^sources.0.path: input should be a valid string; got 3"),
        ("sources.0.weight", "much", "^sources.0.weight: input should be a valid number"),
        ("tokenizer.backend", "fast", "^tokenizer.backend: input should be 'auto', 'tokenizers' or 'tiktoken'"),
        ("packing.strategy", "best", "^packing.strategy: input should be 'concat' or 'best_fit'; got 'best'"),
        ("packing", None, "^packing: input should be a dictionary"),
        ("shuffle.window_tokens", "large", "^shuffle.window_tokens: input should be a valid integer"),
        ("resources.tokenize_actors", [1, 2, 3], "^resources.tokenize_actors: tuple should have at most 2 items"),
        ("sources.0.path", ..., "^sources.0.path is required; got nothing: add it$"),
        ("tokenizer", ..., "^tokenizer is required"),
        ("lanez", 3, "^lanez is not a setting; got 3: did you mean lanes[?]$"),
        (
            "shuffle.windows_tokens",
            3,
            "^shuffle.windows_tokens is not a setting; got 3: did you mean window_tokens[?]$",
        ),
        ("sources.0.wieght", 3, "^sources.0.wieght is not a setting; got 3: did you mean weight[?]$"),
        ("qqq", 3, "^qqq is not a setting; got 3: remove it$"),
    ],
)
def test_a_wrong_type_or_key_is_one_line_with_the_key(path: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        IngestConfig.from_dict(with_setting(path, value))
    assert "\n" not in str(caught.value)


def test_weights_of_some_sources_only_are_refused() -> None:
    plain = with_setting("sources", [{"name": "a", "path": "a", "weight": 0.5}, {"name": "b", "path": "b"}])
    with pytest.raises(
        ConfigError, match=r"sources.weight must be set for every source or for none; got \[0.5, None\]"
    ):
        IngestConfig.from_dict(plain)


def test_epochs_and_total_tokens_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="only one of epochs and total_tokens may be set"):
        IngestConfig.from_dict({**SMALLEST, "epochs": 1, "total_tokens": 1})


@pytest.mark.parametrize(
    "build",
    [
        lambda: SourceConfig(name="a", path="a", weight=0.0),
        lambda: StorageConfig(max_attempts=0),
        lambda: PackingConfig(sequence_length=1),
        lambda: ShuffleConfig(seed=-1),
        lambda: ResourcesConfig(prefetch_windows=0),
        lambda: IngestConfig(sources=(), tokenizer=TokenizerConfig(path="t")),
        lambda: replace(IngestConfig.from_dict(SMALLEST), lanes=7),
    ],
    ids=["source", "storage", "packing", "shuffle", "resources", "run", "replace"],
)
def test_a_config_built_in_python_obeys_the_rules(build) -> None:
    with pytest.raises(ConfigError):
        build()


@pytest.mark.parametrize("settings", [None, [], "lanes", 3, [1]])
def test_settings_that_are_no_mapping_are_refused(settings: object) -> None:
    with pytest.raises(ConfigError, match=r"a config must be a mapping of settings; got (NoneType|list|str|int)"):
        IngestConfig.from_dict(settings)


def test_keys_that_are_no_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="keys should be strings"):
        IngestConfig.from_dict({1: 2, **SMALLEST})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a config must be a mapping of settings; got NoneType"),
        ("- 1\n", "a config must be a mapping of settings; got list"),
        ("lanes: [8", "must be YAML; .*line 1"),
        ("lanes: 8\n  more: 2\n", "must be YAML; .*line 2"),
        ("lanes: 8\0", "must be YAML"),
        ("lanes: 2024-99-99\n", "must be YAML; month must be in 1..12"),
        ("[" * 500, "must be YAML; maximum recursion depth"),
        ("lanes: 0\n" + "tokenizer: {path: t}\nsources: [{name: a, path: a}]\n", "lanes must be 1 to 65536; got 0"),
        ("lanes: !!python/object/apply:os.getcwd []\n", "must be YAML; could not determine a constructor"),
    ],
    ids=["empty", "list", "cut", "indent", "NUL", "date", "deep", "rule", "code"],
)
def test_a_file_that_is_no_config_is_refused_by_name_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"config {path}.*{words}") as caught:
        IngestConfig.from_yaml(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config \S+none.yaml cannot be read; .*No such file"):
        IngestConfig.from_yaml(tmp_path / "none.yaml")


def test_a_folder_or_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"lanes: \xff")
    for path in (tmp_path, tmp_path / "latin.yaml"):
        with pytest.raises(ConfigError, match="cannot be read"):
            IngestConfig.from_yaml(path)
