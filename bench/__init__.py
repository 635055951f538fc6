"""Benches: ratios to peers and to physical limits, each started as ``python -m bench.NAME``; ``python -m bench`` lists them.

Some use helpers of the tests, which are found beside this folder.
"""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parents[1] / "tests")
if _TESTS not in sys.path:
    sys.path.append(_TESTS)
