"""Steps and a snapshot under PyTorch's detector of races between streams: ``python -m null_gpu.streams fence|no-fence FOLDER KIND ...``.

Prints each kind and its number of races. With ``no-fence`` the next update does not wait for the snapshot, which is a race.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch.cuda import _sanitizer as sanitizer

from null_gpu import answers
from null_gpu.kinds import all_kinds
from null_gpu.steps import stepper_of
from phalanx.checkpoint.save.staging import StagingBuffers
from phalanx.run.spec import RunSpec
from phalanx.train.step.state import state_shards


def races(spec: RunSpec, *, is_fenced: bool) -> int:
    """Train four steps with a snapshot behind the second; return the races of the first operation that has any."""
    buffers = StagingBuffers()
    try:
        with stepper_of(spec, spec.parallel.expert) as (stepper, step):
            step()
            step()
            built = stepper.built
            staged = buffers.stage(state_shards(built.model.parts, built.optimizer, built.placement))
            stepper.run(3, before_update=buffers.fence if is_fenced else lambda: None)
            staged.wait()
            buffers.release(staged)
            stepper.run(4)
    except sanitizer.CUDASanitizerErrors as detected:
        print(detected.errors[0], file=sys.stderr)
        return len(detected.errors)
    finally:
        buffers.close()
    return 0


if __name__ == "__main__":
    sanitizer.enable_cuda_sanitizer()  # type: ignore[no-untyped-call]  # before anything runs on a device
    answers.pretend(fused=False)
    kinds = all_kinds(Path(sys.argv[2]))
    for name in sys.argv[3:]:
        print(f"{name}:", races(kinds[name], is_fenced=sys.argv[1] == "fence"), flush=True)
