"""The text at the end of a run is an extra: a run whose text cannot be computed here has ended well all the same."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from phalanx.cli.train.session import _sample
from phalanx.run.rules import NotPortableError
from phalanx.run.spec import SampleSpec


@pytest.mark.parametrize(
    "error", [NotPortableError("PyTorch uses AVX512 [already]"), KeyError("PyTorch uses AVX512 [already]")]
)
def test_a_text_that_cannot_be_computed_is_a_line_and_no_text(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path, _sample: SampleSpec) -> str:
        raise error

    monkeypatch.setattr("phalanx_serve.generate.sample_text", refuse)
    console = Console(file=io.StringIO(), width=200, markup=False)
    assert _sample(Path("run"), SampleSpec(prompt="x"), console) is None
    assert "PyTorch uses AVX512 [already]" in console.file.getvalue()  # type: ignore[attr-defined]
