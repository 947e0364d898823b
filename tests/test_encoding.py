"""Every kind of source to tokens: literal ids and masks, what is dropped, and what is refused with its place."""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.columns import sizes
from ingest.config import FimConfig, IngestConfig, SourceConfig, TokenizerConfig
from ingest.documents import encode_rows
from ingest.encoding import Prompt, Text, Tokens, source_encoders
from ingest.errors import ConfigError, DataError
from ingest.fim import Fim, split_middle
from ingest.pieces import NO_LABEL_BIT, DocumentError
from ingest.plan import document_words
from ingest.spec import UnitSpec
from ingest.storage import Storage
from ingest.transforms import UserTransform
from tests.chats import BOS, CHATML, EOS, MIDDLE, PREFIX, SUFFIX, chat_json, chat_tokenizer

UNIT = UnitSpec(0, 0, "a.parquet", 3, 0, "", number=7)
FIM = Fim(FimConfig(rate=1.0), PREFIX, MIDDLE, SUFFIX, seed=0, source="code")


def prompts(*pairs: tuple[str | None, str | None]) -> pa.Array:
    columns = [pa.array(list(column), pa.large_string()) for column in zip(*pairs, strict=True)]
    return pa.StructArray.from_arrays(columns, ["prompt", "response"])


def tokens_of(rows: pa.Array, bos: int | None = None, vocab_size: int = 300):
    encode = Tokens(vocab_size, EOS, bos, np.dtype(np.uint16))
    flat, lengths = encode(rows, UNIT, np.arange(len(rows)))
    assert flat.dtype == np.uint16
    return [part.tolist() for part in np.split(flat, np.cumsum(lengths)[:-1])]


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.uint64()), pa.list_(pa.int64(), 2)])
def test_tokens_are_taken_as_they_are_with_one_eos(kind: pa.DataType) -> None:
    assert tokens_of(pa.array([[5, 6], [7, EOS], [EOS, 8]], kind)) == [[5, 6, EOS], [7, EOS], [EOS, 8, EOS]]


def test_tokens_get_the_bos_that_is_missing() -> None:
    rows = pa.array([[5], [BOS], [BOS, 6, EOS], [7, BOS]], pa.list_(pa.int32()))
    assert tokens_of(rows, BOS) == [[BOS, 5, EOS], [BOS, EOS], [BOS, 6, EOS], [BOS, 7, BOS, EOS]]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1), st.sampled_from([None, BOS]))
def test_tokens_equal_the_slow_definition(rows, bos) -> None:
    expected = [
        [*([bos] if bos is not None and row[0] != bos else []), *row, *([EOS] if row[-1] != EOS else [])]
        for row in rows
    ]
    array = pa.array([[1], *rows, [2]], pa.list_(pa.int32())).slice(1, len(rows))
    assert tokens_of(array, bos, 10) == expected


@pytest.mark.parametrize("wrong", [300, -1, None])
def test_an_id_outside_the_vocabulary_is_refused_with_file_row_group_row_and_id(wrong: int | None) -> None:
    rows = pa.array([[1], None, [], [2, 3], [4, wrong]], pa.list_(pa.int32()))
    encode = Tokens(300, EOS, None, np.dtype(np.uint16))
    with pytest.raises(DataError) as caught:
        list(encode_rows(rows, UNIT, 10, encode))
    assert str(caught.value) == (
        "a.parquet row group 3 row 14: a token must be an id from 0 to 299; "
        f"got {wrong} at 1: tokenize with this tokenizer"
    )


def test_a_bad_row_is_cut_out_where_the_source_allows_it() -> None:
    rows = pa.array([[1], [999], [2], [-5], [3]], pa.list_(pa.int32()))
    parts = list(encode_rows(rows, UNIT, 10, Tokens(300, EOS, None, np.dtype(np.uint16)), skip=True))
    assert [(part.first_row, part.num_rows) for part in parts[:-1]] == [(11, 1), (13, 1)]
    flat, lengths, numbers = parts[-1]
    assert (flat.tolist(), lengths.tolist(), numbers.tolist()) == ([1, EOS, 2, EOS, 3, EOS], [2, 2, 2], [10, 12, 14])


def test_a_fault_that_is_not_the_rows_own_is_never_cut_out() -> None:
    def audit(*_: object):
        raise DocumentError("tiktoken must give the ids of tokenizers", 0)

    with pytest.raises(DataError, match="row group 3 row 0: tiktoken"):
        list(encode_rows(pa.array(["a"], pa.large_string()), UNIT, 0, audit, skip=True))


def test_rows_that_hold_nothing_have_no_size() -> None:
    assert sizes(pa.array(["ab", None, ""], pa.large_string())).tolist() == [2, 0, 0]
    assert sizes(pa.array([[1, 2, 3], None, []], pa.list_(pa.int8()))).tolist() == [3, 0, 0]
    assert sizes(prompts(("ab", "c"), ("ab", None), ("ab", ""), ("", "c"), (None, "c"))).tolist() == [3, 0, 0, 1, 1]


def test_without_a_template_the_prompt_is_masked_and_the_response_trained_with_its_eos() -> None:
    tokenizer = chat_tokenizer(bos_token="<|bos|>")
    flat, lengths = Prompt(tokenizer, None)(prompts(("hi ", "ok"), ("", "x")), UNIT, np.arange(2))
    hi, ok, x = (tokenizer.encode_plain([text])[0].tolist() for text in ("hi ", "ok", "x"))
    masked = [NO_LABEL_BIT | token for token in [BOS, *hi]]
    assert flat.tolist() == [*masked, *ok, EOS, NO_LABEL_BIT | BOS, *x, EOS]
    assert lengths.tolist() == [len(hi) + len(ok) + 2, 3]


def test_a_response_without_a_prompt_is_refused() -> None:
    with pytest.raises(DocumentError, match="a response must have a prompt; got null") as caught:
        Prompt(chat_tokenizer(), None)(prompts(("a", "b"), (None, "b")), UNIT, np.arange(2))
    assert caught.value.index == 1


def test_a_bos_token_begins_every_document_and_text_cannot_forge_it() -> None:
    tokenizer = chat_tokenizer(bos_token="<|bos|>")
    flat, lengths = tokenizer.encode(["x", "", "<|bos|>"])
    (x,) = tokenizer.encode_plain(["x"])[0].tolist()
    assert flat[:5].tolist() == [BOS, x, EOS, BOS, EOS]
    assert np.count_nonzero(flat == BOS) == 3
    assert lengths.tolist()[:2] == [3, 2]
    assert tokenizer.bare_loop()(["x", ""]) == 5


@pytest.mark.parametrize(
    ("token", "message"), [("<|no|>", "must be in the vocabulary"), ("a", "must be a special token")]
)
def test_a_bos_token_that_text_can_contain_is_refused(token: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"tokenizer.bos_token {message}"):
        chat_tokenizer(bos_token=token)


def ids_of(*texts: str) -> list[int]:
    return [token for ids in chat_tokenizer().encode_plain(list(texts)) for token in ids.tolist()]


@pytest.mark.parametrize("spm", [False, True])
def test_fim_puts_prefix_suffix_and_middle_behind_their_tokens(spm: bool) -> None:
    fim = dataclasses.replace(FIM, config=FimConfig(rate=1.0, spm_rate=float(spm)))
    tokenizer = chat_tokenizer()
    rows, numbers = pa.array(["assistant"], pa.large_string()), np.array([4])
    flat, lengths = Text(tokenizer.encode, fim=fim, tokenizer=tokenizer)(rows, UNIT, numbers)
    words = document_words(0, "code", 0, 7, numbers)[0].tolist()
    prefix, middle, suffix, _ = split_middle("assistant", words, fim.config)
    assert (prefix, middle, suffix) == ("as", "sist", "ant")
    psm = [PREFIX, *ids_of("as"), SUFFIX, *ids_of("ant"), MIDDLE, *ids_of("sist"), EOS]
    assert flat.tolist() == ([PREFIX, SUFFIX, *ids_of("ant"), MIDDLE, *ids_of("as", "sist"), EOS] if spm else psm)
    assert lengths.tolist() == [len(flat)]


@given(st.text(), st.lists(st.integers(0, 2**64 - 1), min_size=4, max_size=4), st.floats(0, 1), st.floats(0, 1))
def test_the_three_parts_joined_are_the_document(text: str, words, rate: float, spm_rate: float) -> None:
    parts = split_middle(text, words, FimConfig(rate=rate, spm_rate=spm_rate))
    assert parts is None or "".join(parts[:3]) == text


@pytest.mark.parametrize(("rate", "spm_rate", "counts"), [(0, 0.5, (0, 0)), (1, 0, (1000, 0)), (1, 1, (1000, 1000))])
def test_rates_of_0_and_1_are_never_and_always(rate: float, spm_rate: float, counts: tuple[int, int]) -> None:
    words = document_words(0, "code", 0, 0, np.arange(1000)).tolist()
    parts = [split_middle("abcdef", each, FimConfig(rate=rate, spm_rate=spm_rate)) for each in words]
    assert (sum(part is not None for part in parts), sum(part is not None and part[3] for part in parts)) == counts


def test_half_of_the_documents_are_turned_by_default_and_half_of_those_are_spm() -> None:
    words = document_words(0, "code", 0, 0, np.arange(10_000)).tolist()
    parts = [part for each in words if (part := split_middle("abcdef", each, FimConfig())) is not None]
    assert 4800 < len(parts) < 5200
    assert 2300 < sum(part[3] for part in parts) < 2700


def test_golden_words_of_a_document() -> None:
    assert document_words(0, "code", 0, 7, np.array([0, 4]))[:, 0].tolist() == [
        4859869072568439094,
        6365854235216258807,
    ]


@given(st.sets(st.integers(0, 300), min_size=1))
def test_the_words_of_a_row_do_not_depend_on_the_rows_beside_it(rows: set[int]) -> None:
    numbers = np.array(sorted(rows))
    whole = document_words(5, "code", 1, 2, np.arange(301))
    assert np.array_equal(document_words(5, "code", 1, 2, numbers), whole[numbers])


def test_words_differ_by_seed_source_epoch_unit_and_row() -> None:
    keys = [(0, "a", 0, 0), (1, "a", 0, 0), (0, "b", 0, 0), (0, "a", 1, 0), (0, "a", 0, 1)]
    words = [tuple(row) for key in keys for row in document_words(*key, np.arange(3)).tolist()]
    assert len(set(words)) == 15
    assert document_words(0, "a", 0, 0, np.zeros(0, np.int64)).shape == (0, 4)


@pytest.mark.parametrize("name", ["rate", "spm_rate"])
def test_a_rate_outside_0_and_1_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"fim\.{name} must be 0 to 1; got 1\.5"):
        FimConfig(**{name: 1.5})


MODULE = """
def upper(texts): return [text.upper() if text != "drop" else None for text in texts]
def shorter(texts): return texts[1:]
def numbers(texts): return [3 if text == "b" else text for text in texts]
def fails(texts): return [1 // 0 if text == "b" else text for text in texts]
empty = lambda texts: ["" for text in texts]
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch) -> str:
    name = f"users_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def transformed(name: str, *texts: str):
    encode = Text(chat_tokenizer().encode, UserTransform(name))
    return encode(pa.array(texts, pa.large_string()), UNIT, np.arange(len(texts)))


def test_a_transform_changes_texts_and_drops_some(module: str) -> None:
    flat, lengths = transformed(f"{module}:upper", "ab", "drop", "c")
    assert flat.tolist() == [*ids_of("AB"), EOS, *ids_of("C"), EOS]
    assert lengths.tolist() == [3, 0, 2]


def test_a_transform_that_drops_everything_gives_no_tokens(module: str) -> None:
    flat, lengths = transformed(f"{module}:empty", "ab", "c")
    assert (flat.tolist(), lengths.tolist()) == ([], [0, 0])


def test_dropped_documents_leave_the_rows_of_the_others_as_they_are(module: str) -> None:
    encode = Text(chat_tokenizer().encode, UserTransform(f"{module}:upper"))
    ((flat, lengths, numbers),) = encode_rows(pa.array(["drop", "", "b"], pa.large_string()), UNIT, 5, encode)
    assert (flat.tolist(), lengths.tolist(), numbers.tolist()) == ([*ids_of("B"), EOS], [2], [7])


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("shorter", ConfigError, "must return as many texts as it gets; got 2 for 3"),
        ("numbers", DocumentError, "must return texts or None; got int"),
        ("fails", DocumentError, "must not fail; ZeroDivisionError"),
    ],
)
def test_a_transform_that_breaks_its_contract_is_refused_by_name(module: str, function, error, message) -> None:
    with pytest.raises(error, match=f"transform {module}:{function} {message}") as caught:
        transformed(f"{module}:{function}", "a", "b", "c")
    assert getattr(caught.value, "index", 1) == 1


@pytest.mark.parametrize(
    ("function", "message"),
    [("missing", "must name a function that can be imported"), ("number", "must name a function; got int")],
)
def test_what_is_no_function_is_refused(module: str, function: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"transform {module}:{function} {message}"):
        UserTransform(f"{module}:{function}")


@pytest.mark.parametrize("name", ["no.such:f", "plain", ":f", "builtins:len"])
def test_a_name_that_cannot_be_imported_or_read_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"transform {name} must"):
        UserTransform(name)


def test_a_pickled_transform_is_imported_again(module: str) -> None:
    copy = pickle.loads(pickle.dumps(UserTransform(f"{module}:upper")))
    assert copy(["a"]) == ["A"]
    assert copy.sha256 == UserTransform(f"{module}:upper").sha256 != UserTransform(f"{module}:empty").sha256


def encoders(folder: Path, **source: object):
    (folder / "tokenizer.json").write_text(chat_json())
    tokenizer = TokenizerConfig(path=str(folder / "tokenizer.json"), backend="tokenizers")
    config = IngestConfig(sources=(SourceConfig(name="a", path="p", **source),), tokenizer=tokenizer)
    return source_encoders(config, chat_tokenizer(), Storage())


def test_a_fim_token_that_is_not_special_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"source a: fim.middle must be a special token of the tokenizer; got 'x'"):
        encoders(tmp_path, fim=FimConfig(middle="x"))


def test_messages_without_a_template_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"tokenizer.chat_template must be set for messages; got nothing, and no .*json"
    ):
        encoders(tmp_path, messages="m")


def test_prompts_take_the_template_beside_the_tokenizer_if_it_has_one(tmp_path: Path) -> None:
    assert encoders(tmp_path, prompt="p", response="r")[0].identity == {"prompt": "p", "response": "r"}
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert encoders(tmp_path, prompt="p", response="r")[0].encode.messages is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    (encoder,) = encoders(tmp_path, prompt="p", response="r")
    assert encoder.identity.keys() == {"prompt", "response", "chat_template"}
    flat, _ = encoder.encode(prompts(("hi", "ok")), UNIT, np.arange(1))
    assert chat_tokenizer().decode(flat[flat < NO_LABEL_BIT]) == "ok<|im_end|>"
