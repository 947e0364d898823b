import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from ingest.config import TokenizerConfig
from ingest.errors import ConfigError, DataError
from ingest.tokenizer import DocumentError, Tokenizer

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


def test_ids_are_those_of_the_library_in_order_over_many_chunks(load, tokenizer_bytes):
    import tokenizers

    library = tokenizers.Tokenizer.from_str(tokenizer_bytes.decode())
    library.no_truncation()
    library.no_padding()
    texts = ["the cat " * 4_000, "", "é日本\r\n\t🙂", "sat " * 262_200, "mat"]
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
        load().encode(["a", "x " * 600_000, "a\ud800b", "c"])
    assert isinstance(caught.value, DocumentError)
    assert caught.value.index == 2


def test_a_missing_text_is_a_data_error_that_says_which_document(load):
    with pytest.raises(DocumentError, match="must be a string; got NoneType") as caught:
        load().encode(["a", None])
    assert caught.value.index == 1


def test_importing_the_module_imports_no_tokenizer_library():
    code = "import sys, ingest.tokenizer; print({'tokenizers', 'tiktoken', 'ray', 'torch'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_parallelism_variable_is_set_only_where_it_is_unset(load):
    load()
    assert os.environ["TOKENIZERS_PARALLELISM"] in ("false", "true")
