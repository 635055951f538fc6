"""Named corpora: the same documents in the same order."""

import pytest

from phalanx.data.errors import CorpusError
from phalanx.data.preparing.files import named_corpus, python_stdlib


def test_the_standard_library_is_found_in_order_and_without_tests() -> None:
    documents = python_stdlib()
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert {"python_stdlib/dataclasses.py", "python_stdlib/json/decoder.py"} <= set(names)
    assert not any(part in name.split("/") for name in names for part in ("test", "tests", "site-packages"))
    assert sum(len(document.text) for document in documents) > 5_000_000


def test_the_standard_library_is_the_same_twice() -> None:
    assert python_stdlib() == python_stdlib()


def test_a_mistyped_corpus_is_refused_with_the_right_name() -> None:
    with pytest.raises(CorpusError, match="did you mean 'python-stdlib'"):
        named_corpus("python_stdlb")
