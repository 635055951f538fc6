"""The document that a token belongs to."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.tokenizers.tokenizer import BytesTokenizer
from phalanx.model.layers.attention.attention import document_ids


@given(texts=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6))
def test_tokens_of_joined_documents_are_numbered_by_their_document(texts: list[str]) -> None:
    tokenizer = BytesTokenizer()
    documents = [[*tokenizer.encode(text), tokenizer.end_of_document] for text in texts]
    tokens = torch.tensor([[token for document in documents for token in document]])
    expected = [number for number, document in enumerate(documents) for _ in document]
    assert document_ids(tokens, tokenizer.end_of_document).tolist() == [expected]


def test_every_sequence_counts_from_its_own_beginning() -> None:
    ids = document_ids(torch.tensor([[1, 9, 2, 9], [9, 9, 3, 4]]), 9)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]


def test_padding_and_documents_without_text_belong_to_the_document_before() -> None:
    assert document_ids(torch.tensor([[1, 9, 9, 2, 9, 9, 9]]), 9).tolist() == [[0, 0, 0, 1, 1, 1, 1]]
