"""Events survive the trip through a line of JSON, also those of other versions."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from observe.recorded import bodies, step
from phalanx.observe.events import (
    Body,
    Event,
    Finished,
    LossSpike,
    Message,
    NonFinite,
    Step,
    TaskEvaluated,
    Unknown,
    decode,
    encode,
)


def same(a: object, b: object) -> bool:
    """Equality in which NaN equals NaN, at any depth."""
    return repr(a) == repr(b)


@given(t=st.floats(0, 4e9), attempt=st.integers(0, 10**6), body=bodies())
def test_every_event_comes_back_as_it_was(t: float, attempt: int, body: Body) -> None:
    event = Event(t, attempt, body)
    assert same(decode(encode(event)), event)


@given(bodies())
def test_a_line_is_strict_json_and_one_line(body: Body) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    line = encode(Event(1.0, 0, body))
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    json.loads(line, parse_constant=refuse)


@given(body=bodies(), cut=st.integers(1, 10_000))
def test_no_proper_prefix_of_a_line_is_taken_for_an_event(body: Body, cut: int) -> None:
    line = encode(Event(1.0, 0, body)).rstrip(b"\n")
    with pytest.raises(ValueError):  # noqa: PT011 (JSON's own error is one)
        decode(line[: cut % len(line)])


def test_a_kind_of_a_newer_version_is_kept_with_its_fields() -> None:
    line = b'{"t":1,"attempt":2,"kind":"Levitated","height_m":3.5,"drift":"NaN"}'
    event = decode(line)
    assert event.body == Unknown("Levitated", event.body.fields)  # type: ignore[union-attr]
    assert same(decode(encode(event)), event)


def test_a_new_field_of_a_known_kind_does_no_harm() -> None:
    assert decode(
        b'{"t":1,"attempt":0,"kind":"Message","level":"info","text":"x","color":"red"}'
    ).body == Message("info", "x")


@pytest.mark.parametrize(
    "fields",
    ['"level":"info"', '"level":"info","text":7', '"level":"shout","text":"x"', '"text":null,"level":1'],
)
def test_a_known_kind_in_a_shape_that_does_not_fit_is_kept_as_unknown(fields: str) -> None:
    body = decode(f'{{"t":1,"attempt":0,"kind":"Message",{fields}}}'.encode()).body
    assert isinstance(body, Unknown)
    assert body.kind == "Message"


def test_whole_numbers_are_floats_where_floats_are_meant() -> None:
    record = json.loads(encode(Event(1.0, 0, step(3, 10))))
    record["loss"] = 2
    body = decode(json.dumps(record).encode()).body
    assert isinstance(body, Step)
    assert isinstance(body.loss, float)


def test_a_loss_that_is_not_a_number_is_not_a_number_again_after_reading() -> None:
    body = decode(encode(Event(1.0, 0, step(3, 10, math.nan)))).body
    assert isinstance(body, Step)
    assert math.isnan(body.loss)


def test_a_result_that_json_cannot_represent_is_refused_when_it_is_written() -> None:
    with pytest.raises(TypeError):
        encode(Event(1.0, 0, Finished({"weights": object()})))


@pytest.mark.parametrize("figure", ["high", None, [1.0]])
def test_a_figure_of_a_task_that_is_no_number_is_refused_by_name(figure: Any) -> None:
    with pytest.raises(TypeError, match=r"the figure 'margin' of 'own' is .* and must be an int or a float"):
        TaskEvaluated(3, "own", "observer", items=1, figures={"margin": figure})


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[1]", b'{"t":1}', b'{"t":"x","attempt":0,"kind":"Message"}', b"\xff"]
)
def test_what_is_no_event_is_an_error(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode(line)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (
            NonFinite(3, "loss nan", skipped=True, ranks=[1]),
            '{"t":1.0,"attempt":0,"kind":"NonFinite","step":3,"what":"loss nan","skipped":true,"first_sample":0,"samples":0,'
            '"ranks":[1],"slots":[],"parameters":[]}',
        ),
        (
            LossSpike(4, 9.0, 2.0, 1.0, 8.0, "skip", 1, 2, figure="gradient norm"),
            '{"t":1.0,"attempt":0,"kind":"LossSpike","step":4,"loss":9.0,"grad_norm":2.0,"typical_loss":1.0,"deviations":8.0,'
            '"action":"skip","first_sample":1,"samples":2,"typical_grad_norm":0.0,"what":"gradient norm","slot":null,"slot_loss":null}',
        ),
    ],
)
def test_an_attribute_with_a_better_name_keeps_its_key_in_the_file(body: Body, line: str) -> None:
    event = Event(1.0, 0, body)
    assert encode(event).decode() == f"{line}\n"
    assert decode(line.encode()) == event
