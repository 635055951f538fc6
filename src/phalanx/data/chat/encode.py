"""Encode conversations: token ids in the model's chat template, and which of them the assistant wrote; keep the template with them.

There is a loss on these alone, and on the token that ends the assistant's turn. What the assistant wrote is told by the template, if it
marks it with ``{% generation %}``; else by rendering one message more and more: an answer is what follows the frame that the template puts before
it (``add_generation_prompt``). That takes a template that writes messages the same whatever follows them; one that does not, as those that
drop earlier thoughts, is refused by the message at which it differs.

Text that spells a special token would become that token, as it does in ``transformers``: whoever writes a message could end a turn
with it. Conversations with such text are refused. One token that no template yields ends a conversation, since the tokenizer's own end token often
ends turns, and fills records up.
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
from phalanx.data.tokenizers.published.byte_fallback import FallbackTokenizer
from phalanx.data.tokenizers.published.files import COMMON_END_TOKENS, CONFIG_FILE, read_config
from phalanx.data.tokenizers.tokenizer import BpeTokenizer, Tokenizer, load_tokenizer, same_tokens

TooLong = Literal["drop", "cut"]


@dataclass(frozen=True)
class ChatLayout:
    """How conversations become records."""

    template: ChatTemplate
    too_long: TooLong = "drop"
    """Leave out a conversation that a record does not hold, or cut it after an answer."""
    on_bad: Literal["stop", "skip"] = "stop"
    """End the preparation at a conversation that cannot be trained on, or leave it out."""


@dataclass(frozen=True)
class Framed:
    """A conversation as the template writes it."""

    text: str
    answers: list[range]
    """Characters of ``text`` that the assistant wrote."""


@dataclass(frozen=True)
class Encoded:
    """Token ids of a conversation, its end included."""

    ids: NDArray[np.uint32]
    """``(tokens,)``"""
    learned: NDArray[np.bool_]
    """``(tokens,)``: True for those with a loss."""


class BadConversationError(ValueError):
    """A conversation that cannot be trained on; the message says why."""


def framed(template: ChatTemplate, conversation: Conversation, specials: Sequence[str] = ()) -> Framed:
    """The conversation in the template. ``specials``: how special tokens are spelled. Raises ``BadConversationError``."""
    messages, tools = conversation.messages, conversation.tools
    try:
        if template.marks_answers:
            text, spans = template.render_marked(messages, tools)
            return Framed(text, [span for span in spans if span])
        text = template.render(messages, answer=False, tools=tools, today=False)
        spans, place = [], 0
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            if number == 0:
                raise BadConversationError(
                    f"begins with the {ASSISTANT}, and the template has no {{% generation %}} to tell an answer from its frame"
                )
            before = template.render(messages[:number], answer=True, tools=tools, today=False)
            until = template.render(messages[: number + 1], answer=False, tools=tools, today=False)
            if not text.startswith(until) or not until.startswith(before) or len(before) < place:
                raise BadConversationError(
                    f"message {number + 1} is written differently once more messages follow it, or than an answer would begin: "
                    f"{_difference(before, until) or _difference(until, text)}; a template that marks answers by {{% generation %}} could be used"
                )
            spans.append(range(len(before), _without_line_end(until, len(before), specials)))
            place = len(until)
        return Framed(text, spans)
    except ChatTemplateError as error:
        raise BadConversationError(str(error)) from error


class ChatEncoder:
    """Encodes conversations for records of ``seq_len`` tokens."""

    def __init__(self, tokenizer: Tokenizer, layout: ChatLayout, seq_len: int) -> None:
        """Raises ``TokenizerError`` for a tokenizer that no chat template can be used with."""
        if not isinstance(tokenizer, BpeTokenizer | FallbackTokenizer):
            raise TokenizerError(
                "chats need the tokenizer that their template was made for: give its tokenizer.json, or the folder of its model"
            )
        self.layout, self._seq_len = layout, seq_len
        self._hf = HfTokenizer.from_str(tokenizer.serialized)
        self._hf.no_truncation()
        self._hf.no_padding()
        self._hf.encode_special_tokens = False
        # Those of most tokenizers leave spaces out of the places that they tell.
        self._hf.post_processor = processors.ByteLevel(trim_offsets=False)
        # A token that takes the white space beside it along changes a message just as a special one does.
        self._specials = tuple(
            added.content
            for added in self._hf.get_added_tokens_decoder().values()
            if added.special or added.lstrip or added.rstrip
        )
        self.end = document_end(tokenizer, layout.template)
        """The token that ends a conversation."""

    def encode(self, text: str) -> Encoded | None:
        """The ids of a conversation (a line of ``conversation_text``); ``None`` if it is too long.

        Raises ``BadConversationError``.
        """
        conversation = read_conversation(text)
        self._require_no_special_tokens(conversation)
        messages = conversation.messages
        stops = [number + 1 for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        wholes = [len(messages)] if self.layout.too_long == "drop" else [len(messages), *reversed(stops)]
        for stop in wholes:
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

    def _encoded(self, found: Framed) -> Encoded:
        encoding = self._hf.encode(found.text, add_special_tokens=False)
        ids = np.array([*encoding.ids, self.end], dtype=np.uint32)
        if (ids[:-1] == self.end).any():
            raise BadConversationError("the template yields the token that would end the conversation")
        begins, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        learned = np.zeros(len(ids), dtype=np.bool_)
        for span in found.answers:
            learned[:-1] |= (ends > span.start) & (begins < span.stop)
        return Encoded(ids, learned)

    def _require_no_special_tokens(self, conversation: Conversation) -> None:
        named = [(f"message {number}", message) for number, message in enumerate(conversation.messages, 1)]
        for what, value in (*named, ("one of its tools", conversation.tools)):
            for text in strings_in(value):
                found = next((token for token in (*self._specials, *MARKS) if token in text), None)
                if found is not None:
                    raise BadConversationError(f"{what} spells the special token {found!r}")


def document_end(tokenizer: BpeTokenizer | FallbackTokenizer, template: ChatTemplate) -> int:
    """A token that ``template`` does not yield: the tokenizer's end of document if that is one. Raises ``TokenizerError`` if there is none."""
    hf = HfTokenizer.from_str(tokenizer.serialized)
    content_of = {
        number: added.content for number, added in hf.get_added_tokens_decoder().items() if added.special
    }
    named = template.special_tokens.get("pad_token")
    content_of.setdefault(tokenizer.end_of_document, tokenizer.end_token)
    preferred = [tokenizer.end_token, named, *COMMON_END_TOKENS]
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
        "all special tokens of the tokenizer are used by the chat template, and none is left to end conversations with: add one to the tokenizer"
    )


def _probed(template: ChatTemplate) -> str:
    """What the template makes of a few messages; nothing of those that it refuses."""
    turn: list[Message] = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
    system: Message = {"role": "system", "content": "c"}
    text = ""
    for messages in ([*turn, *turn], [system, *turn, *turn]):
        with suppress(ChatTemplateError):
            text += template.render(messages, answer=True, today=False)
    return text


def _without_line_end(text: str, start: int, specials: Sequence[str]) -> int:
    """The end of the answer from ``start`` on: behind the special token that ends the turn, without the line break that may follow it."""
    stripped = text.rstrip()
    return (
        len(stripped)
        if len(stripped) > start and stripped.endswith(tuple(specials) or ("\0",))
        else len(text)
    )


def _difference(wanted: str, found: str) -> str:
    """Where ``found`` does not begin with ``wanted``, in words; empty if it does."""
    if found.startswith(wanted):
        return ""
    at = next(
        (n for n, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b),
        min(len(wanted), len(found)),
    )
    return f"{wanted[max(0, at - 20) : at + 20]!r} became {found[max(0, at - 20) : at + 20]!r}"


# The chat template beside a tokenizer: it goes with the dataset, with the run that learned from it, and with the run's export.
#
# A model that was trained on conversations answers only where they are framed as it has learned. So its template must not be lost on the way
# from the data to whoever asks the model. The files are those that ``transformers`` reads: ``chat_template.jinja``, and the special tokens that it may name in
# ``tokenizer_config.json``.


_ANSWER = "answer"


def save_template(folder: Path, template: ChatTemplate) -> None:
    """Puts the template beside the tokenizer in ``folder``; files that say it already are left as they are. Raises ``OSError``."""
    with suppress(ChatTemplateError):
        if read_chat_template(folder) == template:
            return
    (folder / TEMPLATE_FILE).write_bytes(template.source.encode())
    config = read_config(folder)
    lacking = {name: token for name, token in template.special_tokens.items() if config.get(name) is None}
    if lacking:
        (folder / CONFIG_FILE).write_bytes((json.dumps(config | lacking, indent=2) + "\n").encode())


def kept_template(folder: Path) -> ChatTemplate | None:
    """The template that was saved in ``folder``; ``None`` if none was."""
    return read_chat_template(folder) if (folder / TEMPLATE_FILE).exists() else None


def take_over_template(source: Path, folder: Path) -> None:
    """Saves the template of the tokenizer in ``source`` beside the one in ``folder``, where that has none and both are the same tokenizer."""
    with suppress(ChatTemplateError, TokenizerError):
        template = kept_template(source)
        if template is None or (folder / TEMPLATE_FILE).exists():
            return
        if same_tokens(load_tokenizer(source), load_tokenizer(folder)):
            save_template(folder, template)


def turn_ends(template: ChatTemplate, tokenizer: Tokenizer) -> frozenset[int]:
    """The special token that the template writes after an answer: what a model that was trained on it ends its turn with.

    Empty if the template writes none, or frames answers in a way that cannot be told.
    """
    if not isinstance(tokenizer, BpeTokenizer | FallbackTokenizer):
        return frozenset()
    asked: list[Message] = [{"role": "user", "content": "question"}]
    try:
        before = template.render(asked, answer=True, today=False)
        answered: list[Message] = [*asked, {"role": ASSISTANT, "content": _ANSWER}]
        whole = template.render(answered, answer=False, today=False)
    except ChatTemplateError:
        return frozenset()
    begun = before + _ANSWER
    if not whole.startswith(begun):
        return frozenset()
    after = tokenizer.encode_template(whole.removeprefix(begun))
    return frozenset(after[:1]) if after and tokenizer.byte_lengths[after[0]] == 0 else frozenset()
