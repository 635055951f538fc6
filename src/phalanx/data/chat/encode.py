"""Encode conversations into token ids and a loss mask, with the model's chat template.

The loss is on the tokens that the assistant wrote and on the token that ends its turn. A template may mark the assistant's text with
``{% generation %}``. Without marks, the conversation is rendered one message at a time, and an answer is the text after the template's prompt
for an answer (``add_generation_prompt``). This works only if later messages do not change how earlier ones are written. A template that, for
example, drops earlier thoughts is refused, and the error names the message that differs.

Text that spells a special token would become that token, as in ``transformers``, so a message could end a turn. Conversations with such text
are refused. A conversation ends with a token that the template never writes, because the tokenizer's own end token often ends turns. The
same token pads records.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import processors

from phalanx.data.chat.messages import ASSISTANT, Conversation, Message, read_conversation, strings_in
from phalanx.data.chat.renderer import MARKS
from phalanx.data.chat.template import TEMPLATE_FILE, ChatTemplate, ChatTemplateError, read_chat_template
from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.published import (
    COMMON_END_TOKENS,
    CONFIG_FILE,
    PublishedTokenizer,
    read_config,
)
from phalanx.data.tokenizers.tokenizer import Tokenizer, load_tokenizer, same_tokens

TooLong = Literal["drop", "cut"]


@dataclass(frozen=True)
class ChatLayout:
    """Options for turning conversations into records."""

    template: ChatTemplate
    too_long: TooLong = "drop"
    """Leave out a conversation that is too long for a record, or cut it after an answer."""
    on_bad: Literal["stop", "skip"] = "stop"
    """Stop the preparation at an unusable conversation, or leave it out."""


@dataclass(frozen=True)
class Framed:
    """A conversation as rendered by the template."""

    text: str
    answers: list[range]
    """Characters of ``text`` that the assistant wrote."""


@dataclass(frozen=True)
class Encoded:
    """Token ids of a conversation, including its end token."""

    ids: NDArray[np.uint32]
    """``(tokens,)``"""
    learned: NDArray[np.bool_]
    """``(tokens,)``: True for tokens with a loss."""


class BadConversationError(ValueError):
    """A conversation cannot be trained on; the message gives the reason."""


def framed(template: ChatTemplate, conversation: Conversation, specials: Sequence[str] = ()) -> Framed:
    """Return the rendered conversation and the character ranges of the assistant's answers, which are trained on.

    ``specials`` are the texts of special tokens. Answers are the template's ``{% generation %}`` marks, or else are
    located by rendering prefixes of the conversation. Raises ``BadConversationError`` if the template fails; without
    marks also if the assistant begins the conversation, or if prefixes render differently.
    """
    messages, tools = conversation.messages, conversation.tools
    try:
        if template.marks_answers:
            text, spans = template.render_marked(messages, tools)
            return Framed(text, [span for span in spans if span])
        text = template.render(messages, answer=False, tools=tools, today=False)
        spans, answer_end = [], 0
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            if number == 0:
                raise BadConversationError(
                    f"begins with the {ASSISTANT}, and the template has no {{% generation %}} to separate an answer from its frame"
                )
            prompt = template.render(messages[:number], answer=True, tools=tools, today=False)
            prefix = template.render(messages[: number + 1], answer=False, tools=tools, today=False)
            if not text.startswith(prefix) or not prefix.startswith(prompt) or len(prompt) < answer_end:
                raise BadConversationError(
                    f"message {number + 1} is written differently once more messages follow it, or than an answer would begin: "
                    f"{_difference(prompt, prefix) or _difference(prefix, text)}; a template that marks answers by {{% generation %}} could be used"
                )
            spans.append(range(len(prompt), _without_line_end(prefix, len(prompt), specials)))
            answer_end = len(prefix)
        return Framed(text, spans)
    except ChatTemplateError as error:
        raise BadConversationError(str(error)) from error


class ChatEncoder:
    """Encodes conversations for records of ``seq_len`` tokens."""

    def __init__(self, tokenizer: Tokenizer, layout: ChatLayout, seq_len: int) -> None:
        """Prepare to encode conversations of ``layout`` for records of ``seq_len`` tokens, and choose the token that
        ends one.

        Raises ``TokenizerError`` if the tokenizer does not support chat templates, or has no token left to end
        conversations.
        """
        if not isinstance(tokenizer, PublishedTokenizer):
            raise TokenizerError(
                "chats need the tokenizer that their template was made for: give its tokenizer.json, or the folder of its model"
            )
        self.layout, self._seq_len = layout, seq_len
        self._hf = HfTokenizer.from_str(tokenizer.serialized)
        self._hf.no_truncation()
        self._hf.no_padding()
        self._hf.encode_special_tokens = False
        # The default post-processors of most tokenizers trim spaces from the offsets.
        self._hf.post_processor = processors.ByteLevel(trim_offsets=False)
        # A token that absorbs adjacent white space changes a message as a special token does.
        self._specials = tuple(
            added.content
            for added in self._hf.get_added_tokens_decoder().values()
            if added.special or added.lstrip or added.rstrip
        )
        self.end = document_end(tokenizer, layout.template)
        """The token that ends a conversation."""

    def encode(self, text: str) -> Encoded | None:
        """Return a conversation's token ids and loss mask, or ``None`` if it is too long. ``text`` is a line of
        ``conversation_text``.

        Unless ``layout.too_long`` is "drop", a conversation that is too long is cut after the last answer that fits.
        Raises ``BadConversationError`` if it cannot be rendered, spells a special token, or has no answer to train on.
        """
        conversation = read_conversation(text)
        self._require_no_special_tokens(conversation)
        messages = conversation.messages
        stops = [number + 1 for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        lengths = [len(messages)] if self.layout.too_long == "drop" else [len(messages), *reversed(stops)]
        for stop in lengths:
            encoded = self._encoded(
                framed(
                    self.layout.template, Conversation(messages[:stop], conversation.tools), self._specials
                )
            )
            if len(encoded.ids) <= self._seq_len:
                if not encoded.learned.any():
                    raise BadConversationError("the assistant wrote nothing in it")
                return encoded
        return None

    def _encoded(self, rendered: Framed) -> Encoded:
        """Return ids, ended by ``self.end``, and a mask of the tokens that overlap an answer; the end token is not in
        it. Raises ``BadConversationError`` if the text contains the end token.
        """
        encoding = self._hf.encode(rendered.text, add_special_tokens=False)
        ids = np.array([*encoding.ids, self.end], dtype=np.uint32)
        if (ids[:-1] == self.end).any():
            raise BadConversationError("the template yields the token that would end the conversation")
        begins, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        learned = np.zeros(len(ids), dtype=np.bool_)
        for span in rendered.answers:
            learned[:-1] |= (ends > span.start) & (begins < span.stop)
        return Encoded(ids, learned)

    def _require_no_special_tokens(self, conversation: Conversation) -> None:
        """Raise ``BadConversationError`` if a message or a tool contains the text of a special token or a mark."""
        labelled = [(f"message {number}", message) for number, message in enumerate(conversation.messages, 1)]
        for label, value in (*labelled, ("one of its tools", conversation.tools)):
            for text in strings_in(value):
                special = next((token for token in (*self._specials, *MARKS) if token in text), None)
                if special is not None:
                    raise BadConversationError(f"{label} spells the special token {special!r}")


def document_end(tokenizer: PublishedTokenizer, template: ChatTemplate) -> int:
    """Return a special token that ``template`` does not write, preferably the tokenizer's end of document, then its
    padding or a common end token.

    Raises ``TokenizerError`` if there is none.
    """
    hf = HfTokenizer.from_str(tokenizer.serialized)
    content_of = {
        number: added.content for number, added in hf.get_added_tokens_decoder().items() if added.special
    }
    pad_token = template.special_tokens.get("pad_token")
    content_of.setdefault(tokenizer.end_of_document, tokenizer.end_token)
    preferred = [tokenizer.end_token, pad_token, *COMMON_END_TOKENS]
    ordered = sorted(
        content_of,
        key=lambda number: (
            preferred.index(content_of[number])
            if content_of[number] in preferred
            else len(preferred) + number
        ),
    )
    yielded = _probed(template)
    used = {
        content
        for name, content in template.special_tokens.items()
        if name in template.source and name != "pad_token"
    }
    for number in ordered:
        content = content_of[number]
        if content not in used and content not in template.source and content not in yielded:
            return number
    raise TokenizerError(
        "all special tokens of the tokenizer are used by the chat template, and none is left to end conversations with: add one to the tokenizer, "
        'with transformers: t = AutoTokenizer.from_pretrained(FOLDER); t.add_special_tokens({"additional_special_tokens": ["<|enddoc|>"]}); '
        "t.save_pretrained(FOLDER). Its id must be below the model's vocab_size"
    )


def _probed(template: ChatTemplate) -> str:
    """Return the template's output for a few sample messages, without those that it refuses."""
    turn: list[Message] = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
    system: Message = {"role": "system", "content": "c"}
    text = ""
    for messages in ([*turn, *turn], [system, *turn, *turn]):
        with suppress(ChatTemplateError):
            text += template.render(messages, answer=True, today=False)
    return text


def _without_line_end(text: str, start: int, specials: Sequence[str]) -> int:
    """Return the end of the answer that begins at ``start`` of ``text``: without trailing white space if one of
    ``specials`` ends the text before it, else the text's end.
    """
    stripped = text.rstrip()
    return (
        len(stripped)
        if len(stripped) > start and stripped.endswith(tuple(specials) or ("\0",))
        else len(text)
    )


def _difference(prefix: str, text: str) -> str:
    """Return the 40 characters around the place where ``text`` stops beginning with ``prefix``, in both, for
    messages; empty if it begins with it.
    """
    if text.startswith(prefix):
        return ""
    at = next(
        (n for n, (a, b) in enumerate(zip(prefix, text, strict=False)) if a != b),
        min(len(prefix), len(text)),
    )
    return f"{prefix[max(0, at - 20) : at + 20]!r} became {text[max(0, at - 20) : at + 20]!r}"


# The chat template is stored beside the tokenizer, in the dataset, in the run that trains on it and in the run's export.
#
# A model that was trained on conversations needs the same template when it is used. The files are those that ``transformers`` reads:
# ``chat_template.jinja``, and ``tokenizer_config.json`` for the special tokens that the template names.


_ANSWER = "answer"


def save_template(folder: Path, template: ChatTemplate) -> None:
    """Write the template's file to ``folder``, and add its special tokens that the tokenizer's configuration lacks.

    Writes nothing if the same template is there already. Raises ``OSError``, and ``TokenizerError`` for a damaged
    configuration, after the template is written.
    """
    with suppress(ChatTemplateError):
        if read_chat_template(folder) == template:
            return
    (folder / TEMPLATE_FILE).write_bytes(template.source.encode())
    config = read_config(folder)
    missing = {name: token for name, token in template.special_tokens.items() if config.get(name) is None}
    if missing:
        (folder / CONFIG_FILE).write_bytes((json.dumps(config | missing, indent=2) + "\n").encode())


def saved_template(folder: Path) -> ChatTemplate | None:
    """Return the template that was saved in ``folder``; ``None`` if none was."""
    return read_chat_template(folder) if (folder / TEMPLATE_FILE).exists() else None


def take_over_template(source: Path, folder: Path) -> None:
    """Copy the template beside the tokenizer in ``source`` to ``folder``, if ``folder`` has none and both tokenizers
    are the same. Does nothing if either cannot be read.
    """
    with suppress(ChatTemplateError, TokenizerError):
        template = saved_template(source)
        if template is None or (folder / TEMPLATE_FILE).exists():
            return
        if same_tokens(load_tokenizer(source), load_tokenizer(folder)):
            save_template(folder, template)


def turn_ends(template: ChatTemplate, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the special token that the template writes after an answer: a model trained on it ends its turn with this
    token.

    Empty if the template writes none, or if answers cannot be separated from their frame. Also empty if the first token
    after an answer is not a special token, or the tokenizer does not support chat templates.
    """
    if not isinstance(tokenizer, PublishedTokenizer):
        return frozenset()
    question: list[Message] = [{"role": "user", "content": "question"}]
    try:
        prompt = template.render(question, answer=True, today=False)
        dialog: list[Message] = [*question, {"role": ASSISTANT, "content": _ANSWER}]
        full_text = template.render(dialog, answer=False, today=False)
    except ChatTemplateError:
        return frozenset()
    answer_prefix = prompt + _ANSWER
    if not full_text.startswith(answer_prefix):
        return frozenset()
    end_tokens = tokenizer.encode_template(full_text.removeprefix(answer_prefix))
    return (
        frozenset(end_tokens[:1])
        if end_tokens and tokenizer.byte_lengths[end_tokens[0]] == 0
        else frozenset()
    )
