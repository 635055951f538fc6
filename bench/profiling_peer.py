"""What Holistic Trace Analysis 0.5 finds in the recordings that ``bench/profiling.py`` left: run it in HTA's own environment.

/tmp/hta/bin/python bench/profiling_peer.py /tmp/profiles
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from hta.trace_analysis import TraceAnalysis

QUESTIONS = (
    ("get_temporal_breakdown", {"visualize": False}),
    ("get_comm_comp_overlap", {"visualize": False}),
    ("get_gpu_kernel_breakdown", {"visualize": False}),
    ("get_idle_time_breakdown", {"ranks": [0, 1], "visualize": False}),
    ("get_potential_stragglers", {}),
)


def main(folder: Path) -> None:
    """Prints what each of HTA's questions answers for each planted problem."""
    for plant in ("slow_rank", "slow_link", "host_gap"):
        files = {
            int(path.stem.split("-")[1]): str(path) for path in (folder / plant / "torch").glob("rank-*.json")
        }
        print(f"== {plant}: {len(files)} ranks")
        try:
            analysis = TraceAnalysis(trace_files=files, trace_dir="")
        except Exception:
            print("  cannot be loaded:", traceback.format_exc().strip().splitlines()[-1])
            continue
        for question, options in QUESTIONS:
            try:
                answer = getattr(analysis, question)(**options)
                print(f"  {question}:\n{answer}")
            except Exception as error:
                print(f"  {question}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
