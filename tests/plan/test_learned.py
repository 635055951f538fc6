"""Evidence for a plan: the record that holds, and its text."""

from __future__ import annotations

import pytest

from phalanx.hardware.catalog import accelerators
from phalanx_plan.evidence import UNKNOWN_MACHINE, evidence_for, generation_of, learned, maker_of
from phalanx_plan.workload.software import SOFTWARE


def test_software_with_runs_on_the_accelerator_has_their_factor_and_a_band_of_its_own() -> None:
    record = learned().record("nemo", mixture=False)
    assert record is not None
    evidence = evidence_for(learned(), "nemo", "h100", mixture=False)
    assert (evidence.kind, evidence.factor, evidence.band.ratios) == (
        "here",
        record.factors["hopper"],
        record.ratios,
    )
    assert f"{evidence.runs} runs of {evidence.models} models by nemo on h100" in str(evidence)


def test_software_known_elsewhere_keeps_its_factor_and_has_the_band_of_accelerators_that_are_new() -> None:
    evidence = evidence_for(learned(), "nemo", "a100", mixture=False)
    record = learned().record("nemo", mixture=False)
    assert record is not None
    assert (evidence.kind, evidence.factor) == ("elsewhere", record.factor)
    assert evidence.band.ratios == record.elsewhere_ratios


@pytest.mark.parametrize("software", ["phalanx", "megatron", "vtrain"])
@pytest.mark.parametrize("mixture", [False, True])
def test_software_without_runs_is_never_credited_with_being_faster_than_predicted(
    software: str, mixture: bool
) -> None:
    evidence = evidence_for(learned(), software, "h200", mixture=mixture)
    assert evidence.kind == "never"
    assert evidence.factor >= 1
    assert "never measured" in str(evidence)


def test_less_evidence_is_a_wider_band() -> None:
    widths = [evidence_for(learned(), name, "h100", mixture=False).band.sigma for name in ("nemo", "phalanx")]
    assert widths[0] < widths[1]


def test_steps_that_ran_on_this_machine_are_evidence_and_their_factor_is_in_the_constants() -> None:
    evidence = evidence_for(learned(), "phalanx", "this", mixture=False, calibrated=True)
    assert (evidence.kind, evidence.factor) == ("calibrated", 1)
    assert evidence.band.sigma < evidence_for(learned(), "phalanx", "this", mixture=False).band.sigma


def test_every_record_is_of_software_and_accelerators_that_there_are() -> None:
    for record in learned().software:
        assert record.software in SOFTWARE
        assert record.accelerators.keys() <= accelerators().keys()


def test_no_published_run_is_above_the_peak_of_its_format() -> None:
    assert all(0 < best.mfu < 1 for best in learned().best)


@pytest.mark.parametrize("key", sorted(accelerators()))
def test_every_accelerator_of_the_catalog_has_a_generation_with_a_name_of_its_own(key: str) -> None:
    """A key that nobody entered would be taken for a generation, and its software's factor would not be found."""
    assert generation_of(key) != key or key == "cpu"


@pytest.mark.parametrize("key", sorted(accelerators()))
def test_the_maker_of_a_generation_is_that_of_the_catalog(key: str) -> None:
    assert maker_of(key) == accelerators()[key].vendor


@pytest.mark.parametrize(("software", "accelerator"), [("megatron-bridge", "tpu-v5p"), ("maxtext", "h100")])
def test_runs_on_another_makers_accelerators_are_no_evidence(software: str, accelerator: str) -> None:
    evidence = evidence_for(learned(), software, accelerator, mixture=False)
    assert (evidence.kind, evidence.band) == (
        "never",
        evidence_for(learned(), "phalanx", "h100", mixture=False).band,
    )
    assert evidence.factor >= 1


def test_an_accelerator_without_runs_takes_the_factor_of_its_generation() -> None:
    record = learned().record("nemo", mixture=False)
    assert record is not None
    evidence = evidence_for(learned(), "nemo", "h20", mixture=False)
    assert (evidence.kind, evidence.factor) == ("elsewhere", record.factors["hopper"])


@pytest.mark.parametrize("software", ["phalanx", "megatron-bridge"])
@pytest.mark.parametrize("mixture", [False, True])
def test_a_cpu_without_fitted_constants_has_no_band_of_accelerators(software: str, mixture: bool) -> None:
    evidence = evidence_for(learned(), software, "cpu", mixture=mixture)
    assert (evidence.kind, evidence.runs, evidence.factor) == ("never", 0, 1.0)
    assert evidence.band.p95 == pytest.approx(UNKNOWN_MACHINE)
    assert evidence.band.p5 == pytest.approx(1 / UNKNOWN_MACHINE)
    assert evidence.band.sigma > evidence_for(learned(), software, "h100", mixture=mixture).band.sigma
    assert "assumed" in str(evidence)
    fitted = evidence_for(learned(), "phalanx", "cpu", mixture=mixture, calibrated=True)
    assert fitted.kind == "calibrated"
    assert fitted.band.sigma < evidence.band.sigma
