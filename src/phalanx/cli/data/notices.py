"""Lines that are printed about a prepared dataset: held-out text that is trained on too, and folders that were not read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.data.stored.index import DatasetIndex


def lines_of_overlap(shared: int | None, index: DatasetIndex, remedy: str) -> Iterator[str]:
    """A line on how many held-out documents are ``shared`` with the training split, if that was counted and any are held out."""
    documents = index.held_out.documents
    if shared is None or not documents:
        return
    by_name = index.recipe.hold_out_by == "name"
    also = (
        f"; with {remedy}, and another --out, all copies of a text are in one split"
        if shared and by_name
        else ""
    )
    yield f"{shared:,} of {documents:,} held-out documents are in the training split too, word for word{also}"


def lines_of_links(linked: Sequence[Path]) -> Iterator[str]:
    """A line on links to folders, which are not followed; none without any."""
    if linked:
        more = f" and {len(linked) - 3} more" if len(linked) > 3 else ""
        yield f"not read, since links to folders are not followed: {', '.join(map(str, linked[:3]))}{more}; name them to have them read"


def lines_of_turns(out: str, index: DatasetIndex) -> Iterator[str]:
    """A warning if no token of the conversations in the folder ``out`` ends a turn; none for text, and for datasets in stores."""
    from phalanx.data.chat.kept import kept_template, turn_ends
    from phalanx.data.tokenizers.tokenizer import load_tokenizer

    folder = Path(out)
    if index.recipe.chat is None or not folder.is_dir():
        return
    template = kept_template(folder)
    if template is not None and not turn_ends(template, load_tokenizer(folder)):
        yield (
            "warning: no special token of the tokenizer ends an answer in this template, so a model that learns from it may never end its turn; add the "
            "template's tokens to the tokenizer as special ones, or train one for it: --tokenizer bpe --chat-template FILE"
        )
