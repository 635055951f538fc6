"""Differences between the environment of a run and the present one, and whether they can change a bit."""

from __future__ import annotations

import dataclasses

import pytest

from phalanx_watch.runs.reproduce import Changed, RunEnvironment, changes, parse_packages, requirements

THEN = RunEnvironment(
    code={"version": "0.1.0", "git_commit": "c0ffee", "git_dirty": True, "patch_sha256": "ab" * 32},
    packages={"python": "3.11.7", "torch": "2.13.0", "rich": "15.0"},
    processor="Abacus",
    accelerators=("H100",) * 8,
    driver="570.1",
    variables={"OMP_NUM_THREADS": "1", "PHALANX_ONLY_THEN": "x"},
    data_fingerprint="da7a" * 16,
    probes={"sum": "01", "exp": "02"},
)


def now(**changed: object) -> RunEnvironment:
    return dataclasses.replace(THEN, **changed)  # type: ignore[arg-type]


def weights(**changed: object) -> list[tuple[str, str]]:
    return [(change.name, change.weight) for change in changes(THEN, now(**changed))]


def test_an_unchanged_environment_has_no_differences() -> None:
    assert changes(THEN, THEN) == []


def test_another_number_of_the_same_accelerators_is_no_difference() -> None:
    assert weights(accelerators=("H100",)) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"data_fingerprint": "not to be had: gone"}, [("data", "bits")]),
        ({"probes": {"sum": "01", "exp": "99"}}, [("kernels", "bits")]),
        ({"packages": {**THEN.packages, "torch": "2.14.0"}}, [("torch", "perhaps")]),
        ({"packages": {**THEN.packages, "rich": "16.0"}}, [("other packages", "no")]),
        ({"code": {**THEN.code, "git_commit": "beef"}}, [("commit", "perhaps")]),
        ({"code": {**THEN.code, "patch_sha256": "cd" * 32}}, [("changes against the commit", "perhaps")]),
        ({"variables": {"OMP_NUM_THREADS": "2"}}, [("OMP_NUM_THREADS", "no")]),
    ],
)
def test_each_difference_is_named_and_weighed(
    changed: dict[str, object], expected: list[tuple[str, str]]
) -> None:
    assert weights(**changed) == expected


def test_another_machine_may_change_bits_unless_its_probes_are_equal() -> None:
    assert weights(processor="Slide rule", probes={}) == [("processor", "perhaps")]
    assert weights(processor="Slide rule") == [("processor", "no")]


def test_what_surely_changes_bits_comes_first_and_each_change_has_its_former_value() -> None:
    listed = changes(THEN, now(driver="560", data_fingerprint="x", code={**THEN.code, "git_commit": "beef"}))
    assert [change.weight for change in listed] == ["bits", "perhaps", "no"]
    assert listed[1] == Changed("commit", "c0ffee", "beef", "perhaps", "git checkout c0ffee")


def test_changes_of_then_that_git_did_not_list_are_unknown_now() -> None:
    past = dataclasses.replace(THEN, code={"git_dirty": True, "untracked": ["a.py"], "patch_failed": True})
    (change,) = changes(past, dataclasses.replace(now(), code=past.code))
    assert (change.name, change.now, change.weight) == ("changes against the commit", "unknown", "perhaps")


def test_requirements_are_the_recorded_ones_without_what_every_environment_has() -> None:
    listed = "numpy==2.4.6\nphalanx-train==0.1.0\npip==26.0\ntorch==2.13.0+cpu\n"
    assert requirements(listed) == "numpy==2.4.6\ntorch==2.13.0+cpu\n"
    assert parse_packages(listed)["torch"] == "2.13.0+cpu"
