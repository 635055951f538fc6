"""Description of a served run and of its computation: one value for the command, the engine in its process, and every worker's."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct

from phalanx_serve.traffic.events import NOT_EXACT, ONLY_STREAMED


class ServedRun(Struct, frozen=True):
    """Description of a served run; workers receive it as JSON."""

    run_dir: str
    """Run directory or pack."""
    step: int | None
    """None is the newest readable step."""
    dtype: str
    context: int | None
    """Most tokens of a request; None is the training sequence length."""
    memory_bytes: int
    """Memory of KV pages; with ``stream`` that of the process, where 0 is four fifths of the free memory."""
    rows: int
    """Most tokens of a pass."""
    numerics: Literal["exact", "fast"]
    drafts: int | None = 0
    """Tokens that the run's multi-token prediction drafts in each step; None is as many as the model has."""
    kept: Literal["compute", "int8", "fp8"] = "compute"
    """Storage format of keys and values."""
    stream: bool = False
    """True if weights are streamed while they compute."""
    stages: int = 1
    """Pipeline degree: processes that have some layers each."""
    tensor: int = 1
    """Tensor-parallel degree: processes that have a share of each layer."""
    stages_at: str = ""
    """HOST:PORT where all stages but the first join; without it they are started on this machine."""
    token_file: str = ""
    """With ``stages_at``, the file of the shared token."""
    silence_s: float = 30.0
    """Seconds without a heartbeat after which a stage counts as lost."""
    texts: int = 256
    """Most texts computed at a time while weights are streamed."""
    chat_template: str = ""
    """File of the chat template; empty for the model's own."""
    device: str = "cpu"
    """Device: "cpu", "cuda", "cuda:1", or "auto" (a GPU if there is one that can compute the request)."""

    @property
    def path(self) -> Path:
        """The run's directory, or the pack."""
        return Path(self.run_dir)

    @property
    def only_cpu(self) -> str:
        """Reason why only a CPU can compute this; empty if a GPU can."""
        if self.stream:
            return ONLY_STREAMED
        if self.stages > 1 or self.tensor > 1:
            return "the processes of --pipeline and --tensor send each other what a CPU has computed: leave these out, or serve with --device cpu"
        return NOT_EXACT if self.numerics == "exact" else ""

    def text_name(self, name: str | None) -> str:
        """Return the model's name for clients: ``name``, else the directory's, or the pack's without its ending."""
        path = self.path.resolve()
        return name or (path.stem if path.is_file() else path.name)
