"""The rates of a run file."""

from __future__ import annotations

import pytest

from phalanx.launch.placing import TopologyError
from phalanx_plan.planner import fractions


@pytest.mark.parametrize("text", ["leaf", "leaf=", "leaf=none", "leaf=0", "leaf=1.5"])
def test_what_is_no_share_of_a_level_is_refused(text: str) -> None:
    with pytest.raises(TopologyError, match=r"launch\.shares"):
        fractions([text])
