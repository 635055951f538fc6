"""Conversations without a tokenizer: one is trained for their template, and learned answers end with a special token."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from data.chat.test_encode import CHATML, CHATS, TEMPLATES
from phalanx.cli.data.data_command import command as data_command
from phalanx.data.chat.encode import ChatLayout, document_end, saved_template, turn_ends
from phalanx.data.chat.messages import conversation_text
from phalanx.data.chat.template import ChatTemplate, untrained_chat
from phalanx.data.formats.document import Document
from phalanx.data.preparing.prepare import prepare
from phalanx.data.stored.index import TRAIN, loss_bit, read_index
from phalanx.data.stored.shards import TokenShards
from phalanx.data.tokenizers.tokenizer import BpeTokenizer, load_tokenizer

DOCUMENTS = [
    Document(f"{number}-{index}", conversation_text({"messages": chat}, "messages"))
    for number in range(20)
    for index, chat in enumerate(CHATS)
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_tokenizer_is_trained_with_the_special_tokens_of_the_template_and_learned_answers_end_with_one(
    name: str, tmp_path: Path
) -> None:
    layout = ChatLayout(ChatTemplate(TEMPLATES[name], {}))
    prepare(DOCUMENTS, tmp_path / "out", vocab_size=400, packed_seq_len=128, chat=layout)
    tokenizer, template = load_tokenizer(tmp_path / "out"), saved_template(tmp_path / "out")
    assert isinstance(tokenizer, BpeTokenizer)
    assert template is not None
    (end,) = turn_ends(template, tokenizer)
    index = read_index(tmp_path / "out")
    assert index.recipe.chat is not None
    assert index.recipe.chat.document_end == document_end(tokenizer, template) != end
    shards = TokenShards.open(tmp_path / "out", TRAIN)
    stored = np.asarray(shards.read(0, shards.tokens)).astype(np.int64)
    bit = loss_bit(index.dtype)
    learned = (stored & bit) > 0
    lasts = np.flatnonzero(learned[:-1] & ~learned[1:])
    assert set((stored[lasts] & ~bit).tolist()) == {end}
    again = prepare(DOCUMENTS, tmp_path / "out", vocab_size=400, packed_seq_len=128, chat=layout)
    assert again.reused


def test_a_template_that_ends_turns_with_the_end_of_documents_leaves_another_token_to_end_conversations() -> (
    None
):
    own = untrained_chat(ChatTemplate("{{ messages[0].content + eos_token }}", {}))
    assert own.template.special_tokens == {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
    assert own.end == own.special_tokens.index("<|pad|>") + 1
    assert untrained_chat(ChatTemplate(CHATML, {})).end == 0


def test_the_command_warns_of_a_tokenizer_without_the_token_that_ends_a_turn(tmp_path: Path) -> None:
    lines = [json.dumps({"messages": chat}) for chat in CHATS * 10]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "chatml.jinja").write_text(CHATML)
    prepare([Document("a", " ".join(lines)), Document("b", lines[0])], tmp_path / "text", vocab_size=300)
    arguments = ["prepare", str(tmp_path / "chats.jsonl"), "--layout", "chat", "--seq-len", "128"]
    arguments += ["--chat-template", str(tmp_path / "chatml.jinja"), "--vocab-size", "400"]
    for tokenizer, warned in ((str(tmp_path / "text"), True), ("bpe", False)):
        out = str(tmp_path / f"out-{warned}")
        result = CliRunner().invoke(data_command, [*arguments, "--tokenizer", tokenizer, "--out", out])
        assert result.exit_code == 0, result.output
        assert ("may never end its turn" in result.output) == warned
