"""The chat template beside a tokenizer: it goes with the dataset that it framed, the run that learned from that, and the run's export.

A model that was trained on conversations answers only where they are framed as it has learned. So its template must not be lost on the way
from the data to whoever asks the model. The files are those that ``transformers`` reads: ``chat_template.jinja``, and the special tokens that it may name in
``tokenizer_config.json``.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from phalanx.data.chat.messages import ASSISTANT, Message
from phalanx.data.chat.template import TEMPLATE_FILE, ChatTemplate, ChatTemplateError, read_chat_template
from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.published.byte_fallback import FallbackTokenizer
from phalanx.data.tokenizers.published.files import CONFIG_FILE, read_config
from phalanx.data.tokenizers.tokenizer import BpeTokenizer, Tokenizer, load_tokenizer, same_tokens

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
