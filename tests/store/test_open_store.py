"""URLs of stores, the start of their client, and the durable folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.store.obstore_adapter import source_of
from phalanx.store.open_store import check_url, is_remote, joined, open_store
from phalanx.store.store import BadUrlError, DeniedError, MissingSupportError


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "empty path"),
        ("s3://", "names no bucket"),
        ("ftp://host/x", "no such kind"),
        ("file://host/x", "three slashes"),
        ("s3://key:secret@bucket/x", "no user"),
        ("az://container/x?sig=secret", "no user, query"),
    ],
)
def test_a_url_that_names_no_store_is_refused_without_repeating_secrets(url: str, problem: str) -> None:
    with pytest.raises(BadUrlError, match=problem) as caught:
        check_url(url)
    assert "secret" not in str(caught.value)


def test_urls_and_paths_are_told_apart_and_joined() -> None:
    assert [is_remote(place) for place in ("s3://b/p", "file:///x", "runs/x")] == [True, False, False]
    assert check_url("s3://b/p//") == "s3://b/p"
    assert joined("s3://b/p/", "checkpoints", "x") == "s3://b/p/checkpoints/x"


def test_opening_a_folder_does_not_load_the_client_library() -> None:
    code = "import sys, phalanx.store.open_store as s; s.open_store('/tmp/x'); sys.exit('obstore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_aws_profile_without_boto3_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(MissingSupportError, match=r"phalanx-train\[aws\]"):
        open_store("s3://bucket/x")


@pytest.mark.parametrize(
    ("scheme", "environment", "source"),
    [
        ("s3", {"AWS_ACCESS_KEY_ID": "x", "AWS_PROFILE": "y"}, "environment, AWS_ACCESS_KEY_ID"),
        ("s3", {"AWS_WEB_IDENTITY_TOKEN_FILE": "x"}, "web identity"),
        ("s3", {"AWS_PROFILE": "x"}, "AWS profile"),
        ("s3", {}, "instance metadata"),
        ("gs", {"GOOGLE_APPLICATION_CREDENTIALS": "x"}, "environment, GOOGLE_APPLICATION_CREDENTIALS"),
        ("gs", {}, "instance metadata"),
        ("az", {"AZURE_FEDERATED_TOKEN_FILE": "x"}, "workload identity"),
        ("az", {}, "instance metadata"),
    ],
)
def test_the_source_of_credentials_is_named_without_their_values(
    scheme: str, environment: dict[str, str], source: str, tmp_path: Path
) -> None:
    assert source_of(scheme, environment, tmp_path) == source


def test_a_folder_never_lists_what_a_killed_writer_left(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("a/b", b"x")
    (tmp_path / "a" / ".b.0123456789ab.writing").write_bytes(b"half")
    assert [info.key for info in store.list()] == ["a/b"]


def test_a_folder_removes_what_a_killed_writer_left_and_nothing_else(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("a/b", b"x")
    own = tmp_path / "a" / ".notes.writing"
    own.write_text("of the user")
    (tmp_path / "a" / ".b.0123456789ab.writing").write_bytes(b"half")
    store.remove_unfinished()
    assert sorted((tmp_path / "a").iterdir()) == [own, tmp_path / "a" / "b"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_the_right_to_write_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DeniedError, match="permission denied"):
        open_store(str(tmp_path)).put("a", b"x")


@pytest.mark.parametrize("operation", ["put", "create"])
def test_content_and_name_are_fsynced_before_a_write_returns(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    getattr(open_store(str(tmp_path)), operation)("new/object", b"x")
    # The new folder's name, the file's content, the file's name.
    assert [Path(path).name.partition(".writing")[1] or Path(path).name for path in synced] == [
        tmp_path.name,
        ".writing",
        "new",
    ]
