"""vLLM's requests for the ids of a text or a conversation, and for the text of ids."""

from __future__ import annotations

from typing import Any

from phalanx.serve.http.access.admission import LengthLimit
from phalanx.serve.http.protocol import Chat, Detokenize, RefusedError, Tokenize, read_fields, read_object
from phalanx.serve.http.request import require_model
from phalanx.serve.http.served.model_text import ModelText


def tokenize(body: bytes, model: ModelText, room: LengthLimit) -> dict[str, Any]:
    """Return the ids of a ``prompt``, or of ``messages``. Raises RefusedError."""
    fields = read_object(body)
    if "messages" in fields:
        chat = read_fields(Chat, fields)
        require_model(chat.model, model)
        ids = model.chat_ids(chat, room)
    else:
        text = read_fields(Tokenize, fields)
        require_model(text.model, model)
        ids = model.prompt_ids(text.prompt, room, begin=text.add_special_tokens)
    return {"count": len(ids), "max_model_len": room.tokens, "tokens": ids, "token_strs": None}


def detokenize(body: bytes, model: ModelText, _room: LengthLimit) -> dict[str, Any]:
    """Return the text of ids, without that of special tokens. Raises RefusedError."""
    request = read_fields(Detokenize, read_object(body))
    require_model(request.model, model)
    try:
        return {"prompt": model.tokenizer.decode(request.tokens)}
    except ValueError as error:
        raise RefusedError(f"tokens: {error}", "tokens") from error
