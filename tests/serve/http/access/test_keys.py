"""Keys of clients: the file, the limits of each, and what a client that goes beyond them is told."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_serve.http.admission import (
    Key,
    KeyFileError,
    KeyLimits,
    KeyUse,
    add_key,
    parse_limits,
    read_keys,
)
from phalanx_serve.http.protocol import RefusedError


def test_a_key_comes_back_with_its_name_and_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    limits = parse_limits("requests=60,tokens=1000,concurrent=4")
    alice, other = add_key(file, "alice", limits), add_key(file)
    keys = read_keys(file)
    found = keys.find(alice)
    assert found is not None
    assert (found.name, found.limits) == ("alice", KeyLimits(60, 1000, 4))
    unnamed = keys.find(other)
    assert unnamed is not None
    assert unnamed.limits == KeyLimits()
    assert keys.find(alice[:-1]) is None
    assert alice not in file.read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("name=a requests=0", "above 0"),
        ("request=5", "requests, tokens, concurrent"),
        ("requests=5 requests=6", "one each"),
        ("name=a/b", "letters"),
        ("tokens=many", "whole number"),
    ],
)
def test_a_line_that_is_wrong_is_named_with_what_to_write(tmp_path: Path, words: str, told: str) -> None:
    file = tmp_path / "keys"
    add_key(file)
    file.write_text(file.read_text().rstrip() + f" {words}\n")
    with pytest.raises(KeyFileError, match=r"line 1") as error:
        read_keys(file)
    assert told in str(error.value)


def test_two_keys_do_not_share_a_name(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    add_key(file, "alice")
    with pytest.raises(KeyFileError, match="alice"):
        add_key(file, "alice")


def admit(use: KeyUse, tokens: int, now: float) -> None:
    use.begin(now)
    try:
        use.take_tokens(tokens, now)
    except RefusedError:
        use.ended(0, 0, 0, now)
        raise


def sent_away(use: KeyUse, tokens: int, now: float) -> RefusedError | None:
    try:
        admit(use, tokens, now)
    except RefusedError as error:
        return error
    return None


@given(
    limit=st.integers(1, 200),
    steps=st.lists(st.tuples(st.floats(0, 90), st.integers(1, 60), st.floats(0, 1)), max_size=60),
)
def test_no_minute_holds_more_than_twice_its_tokens_and_the_time_told_is_enough(
    limit: int, steps: list[tuple[float, int, float]]
) -> None:
    use = KeyUse.of(Key("a", "", "", KeyLimits(tokens=limit)), 0.0)
    now, spent = 0.0, []
    for passed, tokens, share in steps:
        now += passed
        refused = sent_away(use, tokens, now)
        assert (refused is not None and refused.status == 400) == (tokens > limit)  # never to be admitted
        if tokens > limit:
            continue
        if refused is not None:
            assert refused.status == 429
            now += refused.retry_after
            admit(use, tokens, now)
        made = math.floor(tokens * share)
        use.ended(tokens, made, 0, now)
        spent.append((now, made))
    # A full bucket and a minute's filling: no more than that in any minute, and the limit in the long run.
    for start, _ in spent:
        assert sum(made for at, made in spent if start <= at <= start + 60) <= 2 * limit + 1
    assert sum(made for _, made in spent) <= limit + limit * now / 60 + 1
    assert use.running == 0


def test_each_limit_is_told_by_name_and_counted() -> None:
    use = KeyUse.of(Key("alice", "", "", KeyLimits(requests=2, tokens=1000, concurrent=1)), 0.0)
    admit(use, 10, 0.0)
    with pytest.raises(RefusedError, match="'alice' has 1 requests at a time"):
        admit(use, 10, 0.0)
    use.ended(10, 5, 5, 1.0)
    admit(use, 900, 1.0)
    use.ended(900, 450, 450, 1.0)
    with pytest.raises(RefusedError, match="2 requests in a minute: retry in 29 s"):
        admit(use, 1, 1.0)
    with pytest.raises(RefusedError, match="1000 tokens in a minute"):
        admit(use, 1000, 40.0)
    assert use.refused == {"concurrent": 1, "requests": 1, "tokens": 1}
    assert (use.prompt_tokens, use.generated_tokens) == (455, 455)


def test_a_key_has_a_line_of_its_own_behind_a_last_line_that_an_editor_left_open(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    alice = add_key(file, "alice")
    file.write_text(file.read_text().rstrip("\n"))
    bob = add_key(file, "bob")
    keys = read_keys(file)
    assert [found and found.name for found in (keys.find(alice), keys.find(bob))] == ["alice", "bob"]
