"""Cases of a parametrized test of which the suite runs a few and ``make test-all`` every one.

The suite has ten minutes on two cores. Where one case more is one more layout, format or optimizer through the same code, the suite tries the cases
that are most unlike each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], *, of_the_suite: Collection[Any]) -> list[Any]:
    """All ``cases``, those that are not ``of_the_suite`` marked slow. A tuple is one case of several parameters."""
    cases = list(cases)
    unknown = [case for case in of_the_suite if case not in cases]
    assert not unknown, f"{unknown} are no cases of {cases}"
    return [case if case in of_the_suite else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
