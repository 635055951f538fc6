"""Limit on the length of a text: the model's context, and the pages of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.serve.http.access.admission import pages_of
from phalanx.serve.http.protocol import RefusedError
from phalanx.traffic.block_table import PAGE


@dataclass(frozen=True)
class LengthLimit:
    """The longest text that the server takes."""

    context: int
    """The model's context, in tokens."""
    pages: int
    """Pages of the KV cache; 0 if memory is not counted in pages."""

    @property
    def tokens(self) -> int:
        """The lower of context and KV cache, in tokens."""
        return min(self.context, self.pages * PAGE) if self.pages else self.context

    def require_text(self, text: str, longest_token: int, prompt_field: str) -> None:
        """Raise RefusedError, with the numbers, for a text that is too long whatever its tokens; ``longest_token`` has the most bytes.

        Tokenizing takes time in proportion to the text, so it is looked at before.
        """
        size, most = len(text.encode("utf-8", "surrogatepass")), self.tokens * longest_token
        if size > most:
            raise RefusedError(
                f"a prompt of {size:,} bytes does not fit into the context: {self.tokens:,} tokens have at most {most:,} bytes; shorten the prompt",
                prompt_field,
                code="context_length_exceeded",
            )

    def require(self, prompt_tokens: int, new_tokens: int, prompt_field: str) -> None:
        """Raise RefusedError, with the numbers, for a text that is too long."""
        tokens = prompt_tokens + new_tokens
        field = "max_tokens" if prompt_tokens < self.tokens else prompt_field
        if tokens > self.context:
            raise RefusedError(
                f"a prompt of {prompt_tokens} tokens and {new_tokens} new ones do not fit into the model's context of "
                f"{self.context}: shorten the prompt, or ask for fewer tokens",
                field,
                code="context_length_exceeded",
            )
        if tokens > self.tokens:
            raise RefusedError(
                f"a prompt of {prompt_tokens} tokens and {new_tokens} new ones take {pages_of(tokens)} pages of {PAGE} tokens, and this server "
                f"has {self.pages}: shorten the prompt, ask for fewer tokens, or start the server with more --memory",
                field,
                code="context_length_exceeded",
            )
