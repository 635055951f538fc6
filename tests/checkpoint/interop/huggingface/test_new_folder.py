"""A folder that is written under another name and renamed at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.checkpoint.interop.huggingface.config import HuggingFaceError
from phalanx.checkpoint.interop.huggingface.folders import new_folder


def test_a_folder_that_another_command_made_meanwhile_is_kept_and_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    context = new_folder(out)
    context.__enter__()
    out.mkdir()
    (out / "config.json").touch()
    with pytest.raises(HuggingFaceError, match=f"{out}: was made meanwhile"):
        context.__exit__(None, None, None)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "config.json"]
