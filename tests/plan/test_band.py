"""Bands: quantiles in, the same quantiles out, and the normal distribution as the case that is known."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_plan.evidence import EXACT, LEVELS, Band, normal_band

bands = st.lists(st.floats(0.1, 10), min_size=len(LEVELS), max_size=len(LEVELS)).map(
    lambda ratios: Band(tuple(sorted(ratios)))
)


@given(band=bands)
def test_a_band_has_the_quantiles_that_it_was_given(band: Band) -> None:
    scores = np.array([NormalDist().inv_cdf(level) for level in LEVELS])
    assert band.at(scores) == pytest.approx(band.ratios)


@given(band=bands, scores=st.lists(st.floats(-5, 5), min_size=2, max_size=9))
def test_a_higher_score_is_never_a_lower_ratio(band: Band, scores: list[float]) -> None:
    ratios = band.at(np.array(sorted(scores)))
    assert (np.diff(ratios) >= -1e-9 * ratios[1:]).all()


@given(sd=st.floats(0.01, 1), score=st.floats(-4, 4))
def test_the_band_of_a_normal_distribution_is_its_quantiles_in_the_tails_too(sd: float, score: float) -> None:
    sigma = math.sqrt(math.log1p(sd**2))
    band = normal_band(sd)
    assert band.at(np.array([score]))[0] == pytest.approx(math.exp(sigma * score))
    assert band.sigma == pytest.approx(sigma)


def test_an_exact_prediction_has_no_width() -> None:
    assert EXACT.at(np.array([-3.0, 0.0, 3.0])).tolist() == [1, 1, 1]


@pytest.mark.parametrize("ratios", [(1.0,), (1.0,) * 6 + (0.5,), (0.0,) + (1.0,) * 6])
def test_what_is_no_list_of_quantiles_is_no_band(ratios: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Band(ratios)
