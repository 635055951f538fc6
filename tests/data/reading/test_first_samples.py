"""Figures of the first samples show text that repeats itself, markup, and a loss on the wrong tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from data.chat.test_encode import MARKED, template_of
from phalanx.data.chat.encode import ChatLayout
from phalanx.data.chat.messages import conversation_text
from phalanx.data.formats.document import Document
from phalanx.data.preparing.prepare import prepare
from phalanx.data.reading.dataset import RunData
from phalanx.data.reading.first_samples import facts_of_samples

SEQ_LEN = 128


def words(seed: int, count: int = 200) -> str:
    """Lines of random words."""
    draw = random.Random(seed)
    return "\n".join(
        " ".join("".join(draw.choices("abcdefghijklmnop", k=5)) for _ in range(8)) for _ in range(count // 8)
    )


def figures(folder: Path, texts: list[str]) -> dict[str, float | int | str]:
    documents = [Document(f"{number}", text) for number, text in enumerate(texts)]
    prepare(documents, folder, tokenizer="bytes", held_out_fraction=0.1)
    return facts_of_samples(RunData.open(folder, SEQ_LEN, seed=0))


def test_copies_with_other_headers_are_repeated_and_other_documents_are_not(tmp_path: Path) -> None:
    clean = figures(tmp_path / "clean", [words(seed) for seed in range(60)])
    assert clean["repeated"] == 0
    assert clean["learned"] == 1
    assert "role" not in clean
    copies = [f"of day {number}\n{words(0)}" for number in range(30)]
    repeated = figures(tmp_path / "copies", [*copies, *(words(seed) for seed in range(1, 31))])
    assert 0.3 < float(repeated["repeated"]) < 0.6
    assert clean["held_out_repeated"] == 0
    assert float(repeated["held_out_repeated"]) > 0.2


def test_json_and_text_that_was_encoded_twice_are_counted(tmp_path: Path) -> None:
    plain = [f"{words(seed)}\nnaïve façade, “quoted”" for seed in range(60)]
    assert figures(tmp_path / "plain", plain)["json_lines"] == 0
    assert figures(tmp_path / "accents", ["é à ü “ñ”\n" * 60] * 20)["doubly_encoded"] == 0
    twice = [("é à ü “ñ”\n" * 60).encode().decode("cp1252", "replace")] * 20
    assert float(figures(tmp_path / "twice", twice)["doubly_encoded"]) > 0.4
    objects = [
        "\n".join(json.dumps({"text": line}) for line in words(seed).split("\n")) for seed in range(60)
    ]
    assert float(figures(tmp_path / "json", objects)["json_lines"]) > 0.9


@pytest.mark.parametrize(
    ("template", "ends_learned", "role"),
    [
        (MARKED, 1, "assistant"),
        (MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"), 0, "assistant"),
        (MARKED.replace("== 'assistant'", "== 'user'"), 1, "user"),
    ],
    ids=["as it should be", "without the end", "of the user"],
)
def test_how_learned_spans_begin_and_end_is_counted(
    tmp_path: Path, template: str, ends_learned: float, role: str
) -> None:
    chats = [
        [{"role": "user", "content": words(seed, 8)}, {"role": "assistant", "content": words(-seed, 8)}]
        for seed in range(1, 60)
    ]
    documents = [
        Document(f"{number}", conversation_text({"messages": chat}, "messages"))
        for number, chat in enumerate(chats)
    ]
    layout = ChatLayout(template_of(template))
    prepare(
        documents, tmp_path / "set", vocab_size=400, packed_seq_len=256, chat=layout, held_out_fraction=0.1
    )
    facts = facts_of_samples(RunData.open(tmp_path / "set", 256, seed=0))
    assert facts["ends_learned"] == ends_learned
    assert facts["next_special"] == 1 - ends_learned
    assert (facts["role"], facts["role_share"]) == (role, 1)
    assert 0.2 < float(facts["learned"]) < 0.7
