"""Which expert gives way."""

from __future__ import annotations

from phalanx_serve.weights.ring import ExpertFrequency


def test_an_expert_that_was_chosen_often_stays_until_its_uses_have_aged() -> None:
    frequency = ExpertFrequency(4)
    for turn in range(5):
        frequency.use((1, 0), turn)
    frequency.use((1, 1), 5)
    assert frequency.least([(1, 0), (1, 1)], (), 5) == (1, 1)
    for turn in range(50, 53):
        frequency.use((1, 1), turn)
    assert frequency.least([(1, 0), (1, 1)], (), 53) == (1, 0)


def test_of_two_experts_chosen_as_often_the_shallower_stays() -> None:
    frequency = ExpertFrequency(4)
    for name in ((0, 3), (3, 0)):
        frequency.use(name, 0)
    assert frequency.least([(0, 3), (3, 0)], (), 1) == (3, 0)
    assert frequency.least([(0, 3), (3, 0)], {(3, 0)}, 1) == (0, 3)
    assert frequency.least([(3, 0)], {(3, 0)}, 1) is None
