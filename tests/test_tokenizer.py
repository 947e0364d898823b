import json
import os
import pickle
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from ingest import bpe, parity
from ingest.config import TokenizerConfig
from ingest.errors import ConfigError, DataError
from ingest.parity import Audit
from ingest.tokenizer import DocumentError, Tokenizer, build_reference

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_AFTER = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_AFTER}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_AFTER}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = ["the cat sat on the mat", "the hat that the cat had", "<|endoftext|> is only text here", "x = [1, 2]\n" * 9]


@pytest.fixture(scope="session")
def tokenizer_bytes():
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|pad|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    built.train_from_iterator(TEXTS, trainer)
    built.decoder = decoders.ByteLevel()
    built.enable_truncation(4)
    built.enable_padding(length=7)
    return built.to_str().encode()


@pytest.fixture
def load(tokenizer_bytes):
    def _load(content=tokenizer_bytes, **settings):
        config = TokenizerConfig(path="some/tokenizer.json", **({"backend": "tokenizers"} | settings))
        return Tokenizer.load(config, {"some/tokenizer.json": content}.__getitem__)

    return _load


def test_each_document_ends_with_one_eos(load):
    tokenizer = load()
    flat, lengths = tokenizer.encode(["ab", "", "c"])
    a, b, c = (tokenizer.encode([letter])[0][0] for letter in "abc")
    assert flat.tolist() == [a, b, 0, 0, c, 0]
    assert lengths.tolist() == [3, 1, 2]
    assert (flat.dtype, lengths.dtype) == (np.dtype("uint16"), np.dtype("int64"))


def test_no_documents_give_empty_arrays(load):
    flat, lengths = load().encode([])
    assert (flat.shape, lengths.shape, flat.dtype, lengths.dtype) == ((0,), (0,), np.uint16, np.int64)


def test_text_that_looks_like_a_special_token_stays_text(load):
    tokenizer = load()
    flat, _ = tokenizer.encode(["a<|endoftext|>b<|pad|>"])
    assert np.count_nonzero(flat < 2) == 1
    assert tokenizer.decode(flat) == "a<|endoftext|>b<|pad|><|endoftext|>"


def test_truncation_and_padding_in_the_file_are_off(load):
    flat, lengths = load().encode(["zzzzzzzzzz", "z"])
    assert lengths.tolist() == [11, 2]
    assert flat.tolist() == [flat[0]] * 10 + [0, flat[0], 0]


@pytest.mark.slow
def test_ids_are_those_of_the_library_in_order_over_many_chunks(load, tokenizer_bytes):
    import tokenizers

    library = tokenizers.Tokenizer.from_str(tokenizer_bytes.decode())
    library.no_truncation()
    library.no_padding()
    texts = ["the cat", "", "é日本\r\n\t🙂", "sat " * 262_200, "mat"]
    flat, lengths = load().encode(texts)
    parts = np.split(flat, np.cumsum(lengths)[:-1])
    assert [part.tolist() for part in parts] == [[*library.encode(text).ids, 0] for text in texts]


def test_decode_inverts_encode(load):
    text = "  é 日本 🙂\r\n\x00 the cat"
    tokenizer = load()
    assert tokenizer.decode(tokenizer.encode([text])[0][:-1]) == text


def test_pickle_carries_the_file_and_not_the_encoder(load, tokenizer_bytes):
    tokenizer = load()
    tokenizer.encode(["the cat"])
    pickled = pickle.dumps(tokenizer)
    assert len(pickled) < len(tokenizer_bytes) + 2000
    copy = pickle.loads(pickled)
    assert copy.encode(["the cat"])[0].tolist() == tokenizer.encode(["the cat"])[0].tolist()
    assert (copy.sha256, copy.eos_id, copy.vocab_size) == (tokenizer.sha256, 0, 298)


def test_vocab_size_is_the_highest_id_plus_one_and_decides_the_dtype(load, tokenizer_bytes):
    settings = json.loads(tokenizer_bytes)
    settings["added_tokens"].append({**settings["added_tokens"][1], "id": 70_000, "content": "<|far|>"})
    settings["model"]["vocab"]["<|far|>"] = 70_000
    tokenizer = load(json.dumps(settings).encode(), eos_token="<|far|>")
    assert (tokenizer.vocab_size, tokenizer.token_dtype) == (70_001, np.dtype("uint32"))
    assert tokenizer.encode([""])[0].tolist() == [70_000]


def test_another_token_can_end_documents(load):
    assert load(eos_token="<|pad|>").encode(["", ""])[0].tolist() == [1, 1]


def test_an_unknown_eos_token_is_refused_with_the_candidates(load):
    with pytest.raises(ConfigError) as caught:
        load(eos_token="</s>")
    assert str(caught.value) == (
        "tokenizer.eos_token must be in the vocabulary of some/tokenizer.json; got '</s>': "
        "set tokenizer.eos_token to one of its special tokens, such as <|endoftext|>, <|pad|>"
    )


@pytest.mark.parametrize("content", [b"", b"hello", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_a_file_that_is_no_tokenizer_is_refused_by_name(load, content):
    with pytest.raises(ConfigError, match=r"^tokenizer some/tokenizer.json must be a tokenizer.json; .+: name a"):
        load(content)


def test_a_lone_surrogate_is_a_data_error_that_says_which_document(load):
    with pytest.raises(DataError, match="at character 1: repair or drop it") as caught:
        load().encode(["a", "b", "a\ud800b", "c"])
    assert isinstance(caught.value, DocumentError)
    assert caught.value.index == 2


def test_a_missing_text_is_a_data_error_that_says_which_document(load):
    with pytest.raises(DocumentError, match="must be a string; got NoneType") as caught:
        load().encode(["a", None])
    assert caught.value.index == 1


@pytest.mark.slow
def test_importing_the_module_imports_no_tokenizer_library():
    code = "import sys, ingest.tokenizer; print({'tokenizers', 'tiktoken', 'ray', 'torch'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_parallelism_variable_is_set_only_where_it_is_unset(load):
    load()
    assert os.environ["TOKENIZERS_PARALLELISM"] in ("false", "true")


# The fast backend.

TEXT_SUFFIXES = (
    ".c",
    ".cpp",
    ".h",
    ".hpp",
    ".html",
    ".js",
    ".json",
    ".md",
    ".pl",
    ".pm",
    ".py",
    ".pyi",
    ".rst",
    ".txt",
)


def split(regex):
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    cut = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, byte_level]}


@pytest.fixture
def changed(tokenizer_bytes):
    def _changed(change):
        settings = json.loads(tokenizer_bytes)
        change(settings)
        return json.dumps(settings).encode()

    return _changed


def add_token(settings, **flags):
    token = {**settings["added_tokens"][0], "id": 298, "content": "<tool>", "special": False, **flags}
    settings["added_tokens"].append(token)


def add_vocab(settings, token, *pairs, ignore_merges=False):
    settings["model"]["vocab"][token] = 298
    settings["model"]["merges"] += pairs
    settings["model"]["ignore_merges"] = ignore_merges


@pytest.fixture(scope="session")
def fast(tokenizer_bytes):
    return Tokenizer.load(TokenizerConfig(path="t.json", backend="auto"), lambda _: tokenizer_bytes)


def test_auto_takes_the_fast_backend_and_gives_the_ids_of_the_reference(fast, load):
    assert (fast.backend_name, fast.backend_reason) == ("tiktoken", "gives the same ids and is faster")
    texts = [*TEXTS, "", "é日本\r\n\t🙂 e\u0301", "<|pad|><|endoftext|>", "x" * 3000]
    for mine, other in zip(fast.encode(texts), load().encode(texts), strict=True):
        assert mine.tolist() == other.tolist()
        assert mine.dtype == other.dtype


def test_the_reference_is_used_where_it_is_asked_for(load):
    assert (load().backend_name, load().backend_reason) == ("tokenizers", "tokenizer.backend asks for it")


def test_a_pickled_tokenizer_keeps_its_backend_and_not_its_encoder(fast, tokenizer_bytes):
    pickled = pickle.dumps(fast)
    assert len(pickled) < len(tokenizer_bytes) + 2000
    copy = pickle.loads(pickled)
    assert copy.backend_name == "tiktoken"
    assert copy.encode(["the cat"])[0].tolist() == fast.encode(["the cat"])[0].tolist()


@pytest.mark.slow
def test_a_run_too_long_for_the_regex_of_tiktoken_is_left_to_the_reference(fast, load):
    texts = ["the", "x" + " " * 1_100_000 + "y"]
    assert np.array_equal(fast.encode(texts)[0], load().encode(texts)[0])


def test_the_fast_backend_says_which_document_holds_a_lone_surrogate(fast):
    with pytest.raises(DocumentError, match="at character 1: repair or drop it") as caught:
        fast.encode(["a", "b", "a\ud800b"])
    assert caught.value.index == 2


def test_a_document_with_an_added_token_is_left_to_the_reference(changed):
    content = changed(add_token)
    reference = build_reference(content, "t.json")
    mapped = bpe.map_tokenizer(content, reference)
    plain, holding = mapped.encode(["a<tool", "a<tool>b"])
    assert plain.tolist() == reference.encode("a<tool").ids
    assert holding is None
    assert 298 in reference.encode("a<tool>b").ids


def test_text_is_normalized_by_the_code_of_the_reference(changed):
    content = changed(lambda settings: settings.update(normalizer={"type": "NFC"}))
    reference = build_reference(content, "t.json")
    mapped = bpe.map_tokenizer(content, reference)
    texts = ["e\u0301", "é", "\u212a", "e\u0301<|pad|>"]
    assert [ids.tolist() for ids in mapped.encode(texts)] == [reference.encode(text).ids for text in texts]
    assert mapped.encode(["e\u0301"])[0].tolist() == mapped.encode(["é"])[0].tolist()


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"a|\p{N}+|\s+(?!\S)|\s+", r"(?:a|\p{N}+)|\s+(?!\S)|\s+"),
        (r"(?i:'s|'t)|[^|(]|(?:a|b)c|\s+(?!\S)|\s", r"(?:(?i:'s|'t)|[^|(]|(?:a|b)c)|\s+(?!\S)|\s"),
        (r"(?:a|\s+(?!\S))|b", r"(?:a|\s+(?!\S))|b"),
        (r"\s+(?!\S)|a|b", r"\s+(?!\S)|a|b"),
        (r"a|b", r"a|b"),
    ],
)
def test_alternatives_before_the_first_look_around_become_one_group(pattern, expected):
    assert bpe.grouped(pattern) == expected


def test_a_token_that_no_merge_makes_is_never_made(changed):
    content = changed(lambda settings: add_vocab(settings, "qzq"))
    reference = build_reference(content, "t.json")
    assert bpe.map_tokenizer(content, reference).encode(["qzq"])[0].tolist() == reference.encode("qzq").ids
    assert len(reference.encode("qzq").ids) == 3


def test_a_whole_piece_that_no_merge_makes_is_its_token_with_ignore_merges(changed):
    content = changed(lambda settings: add_vocab(settings, "qzq", ignore_merges=True))
    reference = build_reference(content, "t.json")
    mapped = bpe.map_tokenizer(content, reference)
    assert mapped.encode(["qzq"])[0].tolist() == reference.encode("qzq").ids == [298]
    assert mapped.encode(["qzqz"])[0].tolist() == reference.encode("qzqz").ids


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s.update(normalizer={"type": "NFKC"}), "the normalizer is NFKC, not NFC or none"),
        (lambda s: s.update(pre_tokenizer=None), "the pre-tokenizer is none, not ByteLevel or Split+ByteLevel"),
        (lambda s: s.update(pre_tokenizer={"type": "Whitespace"}), "the pre-tokenizer is Whitespace, not"),
        (lambda s: s["pre_tokenizer"].update(add_prefix_space=True), "puts a space before each document"),
        (lambda s: s["pre_tokenizer"].update(use_regex=False), "splits twice, or not at all"),
        (lambda s: s.update(pre_tokenizer=split(r"\p{N}{1,3}+|\s+")), "may read differently"),
        (lambda s: s.update(pre_tokenizer=split(r"[a-z]+|[^a-z]+")), "may read differently"),
        (lambda s: s["model"].update(dropout=0.1), "the model sets dropout"),
        (lambda s: s["model"].update(byte_fallback=True), "the model sets byte_fallback"),
        (lambda s: s["model"]["merges"].reverse(), "the merges are not in the order of their ids"),
        (lambda s: add_token(s, content="  "), "is white space, so most documents hold it"),
        (lambda s: add_vocab(s, "sq", ignore_merges=True), "is not made by the merges of its own bytes"),
        (lambda s: add_vocab(s, "日", ignore_merges=True), "'日', which stands for no byte"),
    ],
)
def test_what_is_not_understood_is_left_to_the_reference_with_a_reason(load, changed, change, reason):
    content = changed(change)
    tokenizer = load(content, backend="auto")
    assert tokenizer.backend_name == "tokenizers"
    assert reason in tokenizer.backend_reason
    with pytest.raises(ConfigError, match=r"^tokenizer.backend tiktoken must give the ids of some/tokenizer.json; "):
        load(content, backend="tiktoken")


def test_a_vocabulary_without_every_byte_is_left_to_the_reference(load, changed):
    tokenizer = load(changed(lambda settings: settings["model"]["vocab"].pop("ÿ")), backend="auto")
    assert tokenizer.backend_reason == "a byte is missing from the vocabulary"


def test_a_regex_that_leaves_text_out_is_found_by_the_probes(load, changed):
    tokenizer = load(changed(lambda settings: settings.update(pre_tokenizer=split(r"\p{L}+|\s+"))), backend="auto")
    assert tokenizer.backend_name == "tokenizers"
    assert tokenizer.backend_reason.startswith("the ids of 'def f(x)")


def test_the_first_text_with_other_ids_is_named(changed, tokenizer_bytes):
    mapped = bpe.map_tokenizer(tokenizer_bytes, build_reference(tokenizer_bytes, "t.json"))
    other = build_reference(changed(lambda settings: settings["model"]["merges"].pop()), "t.json")
    assert parity.text_difference(mapped, other, ["a", "the cat"]) is None
    assert parity.text_difference(mapped, other, ["a", "only here"]) == "the ids of 'only here' differ"


def test_verifying_equal_text_keeps_the_fast_backend(fast):
    fast.verify([*TEXTS, "é🙂"])
    assert fast.backend_name == "tiktoken"
    with pytest.raises(DocumentError, match="document must be a string"):
        fast.verify(["a", None])


def test_the_audit_checks_one_document_in_so_many_over_all_calls():
    asked = []

    def reference(texts):
        asked.extend(texts)
        return [np.array([len(text)]) for text in texts]

    audit = Audit(reference, every=3, max_chars=4)
    for texts in (["a", "bb"], ["ccccc", "dddd", "e"], ["f", "g", "h"]):
        audit.check(texts, [np.array([len(text)]) for text in texts])
    assert asked == ["dddd", "g"]


def test_the_audit_refuses_other_ids_and_says_which_document():
    audit = Audit(lambda texts: [np.array([1, 2]) for _ in texts], every=2)
    with pytest.raises(DocumentError, match="differ for a document of 2 characters: set") as caught:
        audit.check(["a", "bb", "c"], [np.array([1, 2]), np.array([1, 3]), np.array([1])])
    assert caught.value.index == 1


@pytest.mark.slow
@pytest.mark.parametrize("regex", [None, LLAMA3, QWEN2, O200K], ids=["gpt2", "llama3", "qwen2", "o200k"])
def test_no_document_of_the_installed_sources_differs(sources, regex, pytestconfig):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None)
    if regex:
        cut = pre_tokenizers.Split(tokenizers.Regex(regex), "isolated")
        built.pre_tokenizer = pre_tokenizers.Sequence([cut, built.pre_tokenizer])
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=pytestconfig.getoption("parity_vocab"),
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    built.train_from_iterator(sources[::4], trainer)
    content = built.to_str().encode()
    mine = Tokenizer.load(TokenizerConfig(path="t.json", backend="tiktoken"), lambda _: content)
    other = Tokenizer.load(TokenizerConfig(path="t.json", backend="tokenizers"), lambda _: content)
    for start in range(0, len(sources), 64):
        texts = sources[start : start + 64]
        for got, expected in zip(mine.encode(texts), other.encode(texts), strict=True):
            assert np.array_equal(got, expected), texts


@pytest.fixture(scope="module")
def sources(pytestconfig):
    """Text that is installed here: the standard library, and with ``--parity-mb`` all packages too."""
    limit = pytestconfig.getoption("parity_mb") << 20
    root = Path(sysconfig.get_path("stdlib"))
    if not limit:
        return [file.read_bytes().decode("utf-8", "replace") for file in sorted(root.glob("*.py"))]
    found, size = [], 0
    for folder in dict.fromkeys((root, Path(sysconfig.get_path("purelib")), Path("/usr/share"), Path("/usr/include"))):
        for file in sorted(folder.rglob("*")):
            if file.suffix in TEXT_SUFFIXES and file.is_file() and size < limit:
                text = file.read_bytes()[: 4 << 20].decode("utf-8", "replace")
                size += len(text)
                found.append(text)
    return list(dict.fromkeys(found))


def test_an_eos_token_that_text_can_contain_is_refused(load, tokenizer_bytes):
    with pytest.raises(ConfigError, match=r"must be a special token of .*; got 'a', which text can contain"):
        load(tokenizer_bytes, eos_token="a")
