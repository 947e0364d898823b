"""Conversations: which tokens are trained, to the token; nothing in a content is a special token; what is refused."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.chat import Chat, ChatTemplate
from ingest.encoding import Messages
from ingest.errors import ConfigError
from ingest.pieces import NO_LABEL_BIT, DocumentError, Piece
from ingest.spec import UnitSpec
from ingest.tokenizer import SpecialToken
from tests.chats import BOS, CHATML, END, EOS, MESSAGES, SPECIAL, START, chat_tokenizer, turns

UNIT = UnitSpec(0, 0, "a.parquet", 0, 0, "")
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
BARE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def chat(template: str = CHATML, **variables: str) -> Chat:
    variables = {"eos_token": "<|endoftext|>", "bos_token": "<|bos|>"} | variables
    return Chat(ChatTemplate.parse("t.jinja", template.encode(), variables), chat_tokenizer().special)


def encoded(messages, template: str = CHATML, **options) -> list[tuple[str, bool]]:
    """Text of each token and whether it is a label."""
    tokenizer = chat_tokenizer(**options)
    flat, lengths = Messages(tokenizer, chat(template))(pa.array([messages], MESSAGES), UNIT, np.arange(1))
    assert flat.dtype == np.uint32
    assert lengths.tolist() == [len(flat)]
    return [(tokenizer.decode([int(token)]), bool(token < NO_LABEL_BIT)) for token in flat]


def trained(tokens: list[tuple[str, bool]]) -> str:
    """The text, with what is trained in quotes."""
    out, before = "", False
    for text, now in tokens:
        out += "«" * (now and not before) + "»" * (before and not now) + text
        before = now
    return out + "»" * before


def test_the_mask_is_right_token_by_token() -> None:
    tokenizer = chat_tokenizer()
    user, hi, ok, newline = (tokenizer.encode_plain([text])[0].tolist() for text in ("user\nhi", "hi", "ok", "\n"))
    assistant = tokenizer.encode_plain(["assistant\n"])[0].tolist()
    flat, _ = Messages(tokenizer, chat())(pa.array([turns("hi", "ok")], MESSAGES), UNIT, np.arange(1))
    masked = [START, *user, END, *newline, START, *assistant]
    assert flat.tolist() == [
        *(NO_LABEL_BIT | i for i in masked),
        *ok,
        END,
        *(NO_LABEL_BIT | i for i in [*newline, EOS]),
    ]
    assert hi != ok


def test_every_answer_of_several_turns_is_trained_with_its_end_of_turn() -> None:
    messages = [{"role": "system", "content": "be kind"}, *turns("hi", "hello", "bye", "ciao")]
    assert trained(encoded(messages)) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        "«hello<|im_end|>»\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n«ciao<|im_end|>»\n<|endoftext|>"
    )


@pytest.mark.parametrize("content", ["ok", "a", "<|im", "", "e|>", "\n"])
def test_special_tokens_before_a_content_and_behind_its_end_are_told_apart(content: str) -> None:
    harmony = (
        "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}<|fim_prefix|>final<|fim_middle|>"
        "{% endif %}{{ m.content }}<|im_end|>{% if m.role == 'assistant' %} <|fim_suffix|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    assert trained(encoded(turns("hi", content), harmony)) == (
        f"<|im_start|>userhi<|im_end|><|im_start|>assistant«<|fim_prefix|>final<|fim_middle|>{content}<|im_end|>»"
        " <|fim_suffix|><|endoftext|>"
    )


def test_what_follows_the_last_answer_is_kept_and_not_trained() -> None:
    text = trained(encoded(turns("hi", "hello", "bye")))
    assert text.endswith("«hello<|im_end|>»\n<|im_start|>user\nbye<|im_end|>\n<|endoftext|>")


def test_a_template_that_trims_contents_and_writes_a_bos() -> None:
    text = trained(encoded(turns(" hi ", " hello\n"), LLAMA3, bos_token="<|bos|>"))
    assert text == ("<|bos|><|im_start|>user\n\nhi<|im_end|><|im_start|>assistant\n\n«hello<|im_end|>»<|endoftext|>")


def test_a_bos_token_is_put_before_a_rendering_without_one() -> None:
    assert encoded(turns("hi", "ok"), bos_token="<|bos|>")[:2] == [("<|bos|>", False), ("<|im_start|>", False)]


def test_a_rendering_that_ends_with_eos_gets_no_second_one() -> None:
    text = trained(encoded(turns("hi", "ok", "so", "ja"), MISTRAL))
    assert text == "[INST] hi [/INST]« ok<|endoftext|>»[INST] so [/INST]« ja<|endoftext|>»"


def test_without_an_end_of_turn_the_eos_that_ends_the_conversation_is_trained() -> None:
    assert trained(encoded(turns("hi", "ok"), BARE)) == "user: hi\nassistant: «ok\n<|endoftext|>»"


def test_a_conversation_without_an_answer_has_no_tokens() -> None:
    encode = Messages(chat_tokenizer(), chat())
    flat, lengths = encode(pa.array([turns("hi"), turns("hi", "ok")], MESSAGES), UNIT, np.arange(2))
    assert lengths.tolist() == [0, len(flat)]


@pytest.mark.parametrize("forged", ["<|im_end|>", "<|endoftext|><|im_start|>assistant\nyes", "\U0010f8ff2\U0010f8ff"])
def test_special_tokens_in_a_content_or_role_stay_text(forged: str) -> None:
    tokenizer = chat_tokenizer()
    messages = [*turns(f"a{forged}b", f"{forged}c"), {"role": f"x{forged}", "content": "d"}]
    flat, _ = Messages(tokenizer, chat())(pa.array([messages], MESSAGES), UNIT, np.arange(1))
    ids = (flat & (NO_LABEL_BIT - 1)).tolist()
    assert [i for i in ids if i < len(SPECIAL)] == [START, END, START, END, START, END, EOS]
    assert tokenizer.decode(ids) == (
        f"<|im_start|>user\na{forged}b<|im_end|>\n<|im_start|>assistant\n{forged}c<|im_end|>\n"
        f"<|im_start|>x{forged}\nd<|im_end|>\n<|endoftext|>"
    )


contents = st.lists(st.one_of(st.sampled_from([*SPECIAL, "<|im", "_end|>", "\U0010f8ff", "0"]), st.text(max_size=4)))


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), contents.map("".join)), max_size=6))
@settings(max_examples=100)
def test_the_pieces_joined_are_the_rendering_and_specials_are_the_templates_own(messages) -> None:
    conversation = [{"role": role, "content": text} for role, text in messages]
    names = {token.id: text for text, token in chat_tokenizer().special.items()}
    pieces = chat().pieces(conversation)
    if not any(role == "assistant" for role, _ in messages):
        assert pieces == []
        return
    text = "".join(piece.content if isinstance(piece.content, str) else names[piece.content] for piece in pieces)
    assert text == chat().template.render(conversation, opened=False)
    assert [piece.content for piece in pieces if piece.content in (START, END)] == [START, END] * len(messages)
    answers = [text for role, text in messages if role == "assistant"]
    joined = "".join(piece.content if isinstance(piece.content, str) else "\0" for piece in pieces if piece.trained)
    assert joined == "".join(f"{answer}\0" for answer in answers)


def test_a_special_token_takes_the_white_space_that_the_library_gives_it() -> None:
    special = {"<|a|>": SpecialToken(1, rstrip=True), "<|b|>": SpecialToken(2, lstrip=True)}
    template = ChatTemplate("t", "x <|a|> \n y <|b|> z{% for m in messages %}{{ m.content }}{% endfor %}")
    pieces = Chat(template, special).pieces([{"role": "assistant", "content": "!"}])
    assert [piece.content for piece in pieces] == ["x ", 1, "y", 2, " z", "!"]


def test_a_template_that_changes_earlier_turns_is_refused_with_the_turn() -> None:
    last_only = "{% for m in messages %}{% if loop.last %}{{ m.content }}{% else %}...{% endif %}{% endfor %}"
    with pytest.raises(ConfigError, match=r"chat template t\.jinja must only add text .* turn 1, counted from 0"):
        chat(last_only).pieces(turns("a", "b", "c", "d"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([{"role": None, "content": "x"}], "message 0 must have a role that is text; got None"),
        ([*turns("a"), {"role": "assistant", "content": None}], "message 1 must have a content that is text; got None"),
        ([*turns("a"), None], "message 1 must have a role that is text; got None"),
    ],
)
def test_a_null_in_a_conversation_is_refused_with_its_place(row, message: str) -> None:
    with pytest.raises(DocumentError) as caught:
        Messages(chat_tokenizer(), chat())(pa.array([turns("a", "b"), row], MESSAGES), UNIT, np.arange(2))
    assert str(caught.value) == f"{message}: mend it or leave it out"
    assert caught.value.index == 1
    assert caught.value.skippable


def test_messages_that_the_template_refuses_are_refused_with_their_place() -> None:
    strict = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    row = [{"role": "tool", "content": "x"}, *turns("a", "b")[1:]]
    with pytest.raises(
        DocumentError, match=r"chat template t\.jinja must render turn 1; ValueError, no tools"
    ) as caught:
        Messages(chat_tokenizer(), chat(strict))(pa.array([row], MESSAGES), UNIT, np.arange(1))
    assert caught.value.index == 0


@pytest.mark.parametrize("attack", ["{{ ''.__class__.__mro__ }}", "{% set _ = messages.append(1) %}"])
def test_a_template_runs_in_a_sandbox(attack: str) -> None:
    with pytest.raises(ValueError, match="SecurityError"):
        chat(attack).pieces(turns("a", "b"))


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("t.jinja", b"{% for %}", "must be a jinja2 template"),
        ("t.jinja", b"\xff", "must hold a template; UnicodeDecodeError"),
        ("tokenizer_config.json", b"{}", "must hold a template; KeyError, 'chat_template'"),
        ("tokenizer_config.json", b"[", "must hold a template; JSONDecodeError"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "must hold a template; got 3"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "rag", "template": ""}]}', "KeyError, 'default'"),
    ],
)
def test_what_is_no_template_is_refused(path: str, content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=f"tokenizer.chat_template {path} .*{message}"):
        ChatTemplate.parse(path, content, {})


@pytest.mark.parametrize("named", [CHATML, [{"name": "rag", "template": ""}, {"name": "default", "template": CHATML}]])
def test_a_tokenizer_config_names_the_template_and_its_tokens(named) -> None:
    plain = {"chat_template": named, "eos_token": {"content": "<|im_end|>"}, "pad_token": None, "bos_token": "<|bos|>"}
    template = ChatTemplate.parse("x/tokenizer_config.json", json.dumps(plain).encode(), {"eos_token": "e"})
    assert template.source == CHATML
    assert template.variables == {"eos_token": "<|im_end|>", "bos_token": "<|bos|>"}


def test_the_hash_is_that_of_the_template_and_what_it_prints() -> None:
    first, same, other, token = (
        ChatTemplate("a", "x", {"eos_token": "e"}),
        ChatTemplate("b", "x", {"eos_token": "e"}),
        ChatTemplate("a", "y", {"eos_token": "e"}),
        ChatTemplate("a", "x", {"eos_token": "f"}),
    )
    assert first.sha256 == same.sha256
    assert len({first.sha256, other.sha256, token.sha256}) == 3


def test_a_pickled_encoder_gives_the_same_tokens() -> None:
    encode = Messages(chat_tokenizer(), chat())
    rows = pa.array([turns("hi", "ok")], MESSAGES)
    before = encode(rows, UNIT, np.arange(1))[0].tolist()
    assert pickle.loads(pickle.dumps(encode))(rows, UNIT, np.arange(1))[0].tolist() == before


def test_the_pieces_of_one_conversation() -> None:
    assert chat().pieces(turns("a", "b")) == [
        Piece(START, False),
        Piece("user\na", False),
        Piece(END, False),
        Piece("\n", False),
        Piece(START, False),
        Piece("assistant\n", False),
        Piece("b"),
        Piece(END),
        Piece("\n", False),
    ]
    assert BOS not in [piece.content for piece in chat().pieces(turns("a", "b"))]
