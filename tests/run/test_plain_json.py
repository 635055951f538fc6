"""JSON that was damaged, or made to break its reader, becomes values that every later user can take."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.run.directory.files import plain_json

_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(_values)
def test_json_of_ordinary_values_is_read_as_it_is(value: Any) -> None:
    assert plain_json(json.dumps(value).encode()) == value


def test_a_whole_number_that_no_field_holds_is_a_float() -> None:
    assert plain_json(b"18446744073709551616") == 2.0**64
    assert plain_json(b"9" * 400) == float("inf")


def test_half_a_pair_is_replaced_and_a_whole_one_is_kept() -> None:
    assert plain_json(b'{"\\ud800": "a\\udfff", "b": "\\ud83d\\ude00"}') == {
        "\ufffd": "a\ufffd",
        "b": "\U0001f600",
    }


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"", b"\xff", b"{", b'"\xed\xa0\x80"']
)
def test_damage_of_every_kind_is_one_error(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        plain_json(content)
