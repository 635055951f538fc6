"""Who computes how many rows in a step."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from phalanx.traffic.batching import Course, plan_step, youngest

COURSES = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), max_size=12).map(
    lambda pairs: [Course(str(i), done, done + left) for i, (done, left) in enumerate(pairs)]
)


@given(COURSES, st.integers(1, 256))
def test_a_step_fills_its_rows_with_no_more_than_there_is_to_compute(
    courses: list[Course], rows: int
) -> None:
    planned = dict(plan_step(courses, rows))
    left = {course.id: course.length - course.computed for course in courses}
    assert all(0 < count <= left[name] for name, count in planned.items())
    assert sum(planned.values()) == min(rows, sum(left.values()))


@given(COURSES, st.integers(12, 256))
def test_whoever_decodes_takes_part_before_any_prompt(courses: list[Course], rows: int) -> None:
    planned = dict(plan_step(courses, rows))
    assert all(planned.get(course.id) == 1 for course in courses if course.length - course.computed == 1)


@given(COURSES, st.lists(st.integers(0, 3), min_size=12, max_size=12), st.integers(1, 40))
def test_a_guess_takes_no_row_of_a_next_token_and_comes_before_prompts(
    courses: list[Course], drafted: list[int], rows: int
) -> None:
    guessing = [replace(course, drafted=number) for course, number in zip(courses, drafted, strict=False)]
    planned = dict(plan_step(guessing, rows))
    assert sum(planned.values()) <= rows
    for course in guessing:
        if course.length - course.computed > 1:
            assert planned.get(course.id, 0) <= course.length - course.computed
        elif planned.get(course.id, 0) > 1:
            assert all(planned.get(other.id) for other in guessing if other.length - other.computed == 1)
            assert planned[course.id] <= 1 + course.drafted


def test_the_request_that_came_last_gives_its_pages_up() -> None:
    assert youngest([Course("a", 0, 9), Course("b", 0, 2)]) == "b"
