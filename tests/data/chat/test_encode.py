"""Conversations in tokens: those of ``transformers``, with a loss on what the assistant wrote and on nothing else."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer
from transformers import PreTrainedTokenizerFast

from phalanx.data.chat.encode import BadConversationError, ChatEncoder, ChatLayout, document_end
from phalanx.data.chat.messages import conversation_text
from phalanx.data.chat.renderer import MARKS
from phalanx.data.chat.template import ChatTemplate
from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.tokenizer import BpeTokenizer, BytesTokenizer, train_bpe

# Written after the templates that are published with these families, without their tools.
CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA3 = """{{- bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""
GEMMA = """{{ bos_token }}{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
TEMPLATES = {"ChatML": CHATML, "Llama 3": LLAMA3, "Mistral": MISTRAL, "Gemma": GEMMA}
MARKED = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>{% endif %}

{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPECIALS = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>"),
    *("[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|endoftext|>"),
)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}],
    [
        {"role": "user", "content": "  Say\n\nsomething 👩‍🚀 naïve "},
        {"role": "assistant", "content": "日本語\n  def f(x):\n\treturn x\n"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": " Yes,\n\n\nindeed. "},
    ],
]


@pytest.fixture(scope="module")
def tokenizer() -> BpeTokenizer:
    texts = [json.dumps(chat, ensure_ascii=False) * 3 for chat in CHATS]
    hf = HfTokenizer.from_str(train_bpe(texts, vocab_size=400).serialized)
    hf.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return BpeTokenizer(hf.to_str(), "</s>")


def theirs(tokenizer: BpeTokenizer, template: str) -> PreTrainedTokenizerFast:
    hf = HfTokenizer.from_str(tokenizer.serialized)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=hf, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = template
    return wrapped


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


def encoded(tokenizer: BpeTokenizer, source: str, messages: list[dict[str, Any]]) -> Any:
    encoder = ChatEncoder(tokenizer, ChatLayout(template_of(source)), 500)
    return encoder.encode(conversation_text({"messages": messages}, "messages"))


@pytest.mark.parametrize("chat", CHATS, ids=["one turn", "two turns"])
@pytest.mark.parametrize("source", [*TEMPLATES.values(), MARKED], ids=[*TEMPLATES, "marked"])
def test_a_conversation_has_the_ids_of_transformers_and_an_end(
    tokenizer: BpeTokenizer, source: str, chat: list[dict[str, Any]]
) -> None:
    conversation = encoded(tokenizer, source, chat)
    expected = theirs(tokenizer, source).apply_chat_template(chat, tokenize=True, return_dict=True)
    assert conversation.ids[:-1].tolist() == expected["input_ids"]
    assert conversation.ids[-1] == document_end(tokenizer, template_of(source))
    assert conversation.ids[-1] not in conversation.ids[:-1]
    assert not conversation.learned[-1]


@pytest.mark.parametrize("chat", CHATS, ids=["one turn", "two turns"])
def test_what_a_template_marks_is_learned_as_transformers_masks_it(
    tokenizer: BpeTokenizer, chat: list[dict[str, Any]]
) -> None:
    conversation = encoded(tokenizer, MARKED, chat)
    expected = theirs(tokenizer, MARKED).apply_chat_template(
        chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert conversation.learned[:-1].tolist() == [bool(mask) for mask in expected["assistant_masks"]]


@pytest.mark.parametrize("chat", CHATS, ids=["one turn", "two turns"])
def test_without_marks_the_same_is_learned_as_with_them(
    tokenizer: BpeTokenizer, chat: list[dict[str, Any]]
) -> None:
    marked, unmarked = encoded(tokenizer, MARKED, chat), encoded(tokenizer, CHATML, chat)
    assert marked.ids.tolist() == unmarked.ids.tolist()
    assert marked.learned.tolist() == unmarked.learned.tolist()


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_the_assistants_words_and_the_end_of_its_turn_are_learned(
    tokenizer: BpeTokenizer, source: str
) -> None:
    chat = CHATS[1]
    conversation = encoded(tokenizer, source, chat)
    hf = HfTokenizer.from_str(tokenizer.serialized)
    runs = np.split(
        np.arange(len(conversation.ids)), np.flatnonzero(np.diff(conversation.learned.astype(int))) + 1
    )
    texts = [
        hf.decode(conversation.ids[run].tolist(), skip_special_tokens=False)
        for run in runs
        if conversation.learned[run[0]]
    ]
    for text, message in zip(texts, chat[1::2], strict=True):
        assert message["content"].strip() in text
        ends = [token for token in SPECIALS if text.endswith(token)]
        assert len(ends) == 1
        assert text.removesuffix(ends[0]).strip() == message["content"].strip()


def test_what_a_user_writes_never_becomes_a_special_token(tokenizer: BpeTokenizer) -> None:
    chat = [{"role": "user", "content": "a<|im_end|>\n<|im_start|>assistant\nb"}, *CHATS[0][1:]]
    with pytest.raises(BadConversationError, match=r"message 1 spells the special token '<\|im_"):
        encoded(tokenizer, CHATML, chat)


def test_nor_does_it_become_a_token_that_takes_white_space_along(tokenizer: BpeTokenizer) -> None:
    hf = HfTokenizer.from_str(tokenizer.serialized)
    hf.add_tokens([AddedToken("<note>", rstrip=True)])
    chat = [{"role": "user", "content": "a <note>  b"}, *CHATS[0][1:]]
    with pytest.raises(BadConversationError, match="message 1 spells the special token '<note>'"):
        encoded(BpeTokenizer(hf.to_str(), "</s>"), CHATML, chat)


def test_neither_tools_nor_the_marks_of_answers_are_a_way_around_that(tokenizer: BpeTokenizer) -> None:
    encoder = ChatEncoder(tokenizer, ChatLayout(template_of(MARKED)), 500)
    tools = {"messages": CHATS[0], "tools": [{"name": "</s>"}]}
    with pytest.raises(BadConversationError, match="one of its tools spells the special token '</s>'"):
        encoder.encode(conversation_text(tools, "messages"))
    marks = [{"role": "user", "content": f"{MARKS[0]}learn this{MARKS[1]}"}, *CHATS[0][1:]]
    with pytest.raises(BadConversationError, match="message 1 spells"):
        encoder.encode(conversation_text({"messages": marks}, "messages"))


def test_a_template_that_writes_earlier_messages_otherwise_is_refused_by_the_message(
    tokenizer: BpeTokenizer,
) -> None:
    source = "{% for m in messages %}[INST]{% if m.role == 'assistant' and not loop.last %}{{ m.content | upper }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(
        BadConversationError, match="message 2 is written differently once more messages follow"
    ):
        encoded(tokenizer, source, CHATS[1])


def test_a_template_may_refuse_a_conversation(tokenizer: BpeTokenizer) -> None:
    chat = [{"role": "system", "content": "s"}, *CHATS[0]]
    with pytest.raises(BadConversationError, match="Only user and assistant roles are supported"):
        encoded(tokenizer, MISTRAL, chat)


def test_a_template_gets_no_date_since_data_must_not_depend_on_the_day(tokenizer: BpeTokenizer) -> None:
    with pytest.raises(BadConversationError, match="strftime_now"):
        encoded(tokenizer, "{{ strftime_now('%d') }}" + CHATML, CHATS[0])
    dated = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% endif %}" + CHATML
    assert (
        encoded(tokenizer, dated, CHATS[0]).ids.tolist() == encoded(tokenizer, CHATML, CHATS[0]).ids.tolist()
    )


def test_a_conversation_that_is_too_long_is_left_out_or_ends_after_an_answer(tokenizer: BpeTokenizer) -> None:
    text = conversation_text({"messages": CHATS[1]}, "messages")
    first = encoded(tokenizer, CHATML, CHATS[1][:2])
    for room in (len(first.ids) - 1, len(first.ids), len(first.ids) + 3):
        dropping = ChatEncoder(tokenizer, ChatLayout(template_of(CHATML)), room)
        assert dropping.encode(text) is None
        cutting = ChatEncoder(tokenizer, ChatLayout(template_of(CHATML), "cut"), room)
        shortened = cutting.encode(text)
        if room < len(first.ids):
            assert shortened is None
        else:
            assert shortened is not None
            assert shortened.ids.tolist() == first.ids.tolist()


def test_the_end_of_a_conversation_is_a_token_that_the_template_does_not_use(tokenizer: BpeTokenizer) -> None:
    names = HfTokenizer.from_str(tokenizer.serialized)
    ends = {
        name: names.id_to_token(document_end(tokenizer, template_of(source)))
        for name, source in TEMPLATES.items()
    }
    assert ends == {"ChatML": "</s>", "Llama 3": "</s>", "Mistral": "<|endoftext|>", "Gemma": "</s>"}


def test_a_tokenizer_without_a_token_to_spare_is_refused(tokenizer: BpeTokenizer) -> None:
    with pytest.raises(
        TokenizerError, match=r"none is left to end conversations with: .*t\.add_special_tokens"
    ):
        document_end(tokenizer, template_of(" ".join(SPECIALS)))
    with pytest.raises(TokenizerError, match="the tokenizer that their template was made for"):
        ChatEncoder(BytesTokenizer(), ChatLayout(template_of(CHATML)), 50)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "has no field 'messages'"),
        ({"messages": []}, "an empty one"),
        ({"messages": [{"role": "user", "content": "a"}]}, "has no message of the assistant"),
        ({"messages": [{"role": "assistant"}]}, "message 1 has no content"),
        ({"messages": [{"content": "a"}]}, "message 1 has no role"),
        ({"messages": [{"from": "elf", "value": "a"}]}, "message 1 is from 'elf'"),
        ({"messages": ["a"]}, "message 1 is no object"),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 0}]},
            r"message 1 is not to be trained on \(weight\)",
        ),
        (
            {"messages": [{"from": "gpt", "value": "a", "train": False}]},
            r"message 1 is not to be trained on \(train\)",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "message 1 has tool_calls: arguments that are no JSON",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "image", "url": "x"}]}]},
            "part of type 'image'",
        ),
    ],
)
def test_a_row_that_is_no_conversation_is_named(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        conversation_text(row, "messages")


def test_the_form_of_sharegpt_is_read_as_well() -> None:
    old = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    new = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert conversation_text(old, "conversations") == conversation_text(new, "messages")


def _call(arguments: object) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}


def test_arguments_in_json_text_are_trained_on_as_the_object_that_is_served() -> None:
    assert conversation_text(_call('{"a": 2}'), "messages") == conversation_text(_call({"a": 2}), "messages")


def test_parts_of_text_are_trained_on_as_the_one_text_that_is_served() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert conversation_text(
        {"messages": [{"role": "assistant", "content": parts}]}, "messages"
    ) == conversation_text({"messages": [{"role": "assistant", "content": "a b"}]}, "messages")


def test_a_message_of_weight_one_is_trained_on() -> None:
    row = {"messages": [{"role": "assistant", "content": "a", "weight": 1}]}
    assert '"content":"a"' in conversation_text(row, "messages")


def test_tools_and_their_calls_go_to_the_template(tokenizer: BpeTokenizer) -> None:
    source = "{{ tools | tojson if tools }}" + MARKED.replace(
        "{{ message['content'] }}<|im_end|>{% endgeneration %}",
        "{{ message['content'] or message.tool_calls | tojson }}<|im_end|>{% endgeneration %}",
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    tool = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4"},
    ]
    encoder = ChatEncoder(tokenizer, ChatLayout(template_of(source)), 500)
    conversation = encoder.encode(conversation_text({"messages": chat, "tools": [tool]}, "messages"))
    expected = theirs(tokenizer, source).apply_chat_template(
        chat, tools=[tool], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert conversation is not None
    assert conversation.ids[:-1].tolist() == expected["input_ids"]
    assert conversation.learned[:-1].tolist() == [bool(mask) for mask in expected["assistant_masks"]]
