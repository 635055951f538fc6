"""Changes of a checkout since its commit: a patch that applies, without secrets, bounded."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from observe.record.test_records import git
from phalanx.observe.record.records import code_patch


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a package and a few other files in one commit; returns the package."""
    package = tmp_path / "repo" / "src" / "phalanx"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("one = 1\n")
    (package / "gone.py").write_text("two = 2\n")
    (tmp_path / "repo" / ".env").write_text("PLACE=here\n")
    (tmp_path / "repo" / "picture.bin").write_bytes(bytes(range(256)))
    git(tmp_path / "repo", "init", "--quiet")
    git(tmp_path / "repo", "add", "-f", ".")
    git(tmp_path / "repo", "commit", "--quiet", "-m", "first")
    return package


def test_a_clean_checkout_and_an_installed_package_have_no_patch(checkout: Path, tmp_path: Path) -> None:
    assert code_patch(checkout, ()) is None
    (tmp_path / "elsewhere").mkdir()
    assert code_patch(tmp_path / "elsewhere", ()) is None


def test_the_patch_makes_the_commit_what_it_was_then(checkout: Path, tmp_path: Path) -> None:
    root = checkout.parents[1]
    (checkout / "__init__.py").write_text("one = 11\n")
    (checkout / "gone.py").unlink()
    (root / "picture.bin").write_bytes(bytes(range(255, -1, -1)))
    (root / ".env").write_bytes(b"\xe9 latin\n")
    git(root, "mv", ".env", "notes.txt")
    (checkout / "new.py").write_text("three = 3\n")
    git(root, "add", "src/phalanx/new.py")
    changes = code_patch(checkout, ())
    assert changes is not None
    subprocess.run(["git", "clone", "--quiet", str(root), str(tmp_path / "clone")], check=True)
    (tmp_path / "patch").write_bytes(changes.patch)
    git(tmp_path / "clone", "apply", str(tmp_path / "patch"))
    for name in ("src/phalanx/__init__.py", "src/phalanx/new.py", "picture.bin", "notes.txt"):
        assert (tmp_path / "clone" / name).read_bytes() == (root / name).read_bytes()
    assert not (tmp_path / "clone" / "src/phalanx/gone.py").exists()
    assert changes.facts() == {"patch_sha256": changes.sha256, "left_out": [".env"]}


def test_untracked_files_are_named_and_not_copied(checkout: Path) -> None:
    (checkout / "mine.py").write_text("my own\n")
    (checkout.parents[1] / "runs").mkdir()
    (checkout.parents[1] / "runs" / "events").write_text("x")
    changes = code_patch(checkout, ())
    assert changes is not None
    assert (changes.untracked, changes.patch) == (("src/phalanx/mine.py",), b"")


def test_files_of_secrets_and_what_looks_like_one_stay_out(checkout: Path) -> None:
    token = "hf_" + "a1B2" * 8
    (checkout.parents[1] / ".env").write_text("PLACE=there\nPIN=12345678\n")
    (checkout / "__init__.py").write_text(
        f'one = "{token}"\nuse(password="correct-horse")\nother = "known-value"\n'
    )
    changes = code_patch(checkout, {"known-value"})
    assert changes is not None
    assert changes.left_out == (".env",)
    assert changes.masked
    for secret in (token, "correct-horse", "12345678", "known-value"):
        assert secret.encode() not in changes.patch


def test_secrets_without_quotes_and_a_removed_key_stay_out_of_files_that_are_no_code(checkout: Path) -> None:
    root = checkout.parents[1]
    body = "".join(f"{chr(65 + row) * 64}\n" for row in range(20))
    (root / "notes.txt").write_text(f"-----BEGIN RSA PRIVATE KEY-----\n{body}-----END RSA PRIVATE KEY-----\n")
    (root / "keys.py").write_text(
        f'KEY = """-----BEGIN RSA PRIVATE KEY-----\n{body}-----END RSA PRIVATE KEY-----"""\n'
    )
    git(root, "add", "notes.txt", "keys.py")
    git(root, "commit", "--quiet", "-m", "second")
    (root / "notes.txt").unlink()
    (root / "keys.py").unlink()
    (root / "deploy.yaml").write_text("password: hunter3hunter3\napi_key: 0123456789abcdef\n")
    (root / "run.sh").write_text("export AWS_SECRET_ACCESS_KEY=abcdefghij/0123\nMY_TOKEN=zyxwvutsrqponm\n")
    (root / "settings.ini").write_text(
        "password = plainsecret98\nHeader: Authorization: Bearer abcdefgh12345678\n"
    )
    git(root, "add", ".")
    changes = code_patch(checkout, ())
    assert changes is not None
    assert changes.masked
    for secret in (
        "hunter3",
        "0123456789abcdef",
        "abcdefghij",
        "zyxwvuts",
        "plainsecret98",
        "abcdefgh12345678",
    ):
        assert secret.encode() not in changes.patch
    for row in range(20):
        assert chr(65 + row).encode() * 64 not in changes.patch


def test_code_about_secrets_that_has_none_is_kept_as_it_is(checkout: Path) -> None:
    lines = [
        "token = read_token(path)",
        'tokenizer = "bpe-of-mine"',
        "password: str",
        'f"{user}:{password}@{host}"',
    ]
    (checkout / "__init__.py").write_text(
        "\n".join([*lines, 'url = f"https://{user}:{password}@{host}"', ""])
    )
    changes = code_patch(checkout, ())
    assert changes is not None
    assert not changes.masked


def test_a_huge_patch_is_cut_and_marked_as_such(checkout: Path) -> None:
    (checkout / "__init__.py").write_text("x = 1\n" * 1000)
    changes = code_patch(checkout, (), max_bytes=1000)
    assert changes is not None
    assert (len(changes.patch), changes.cut) == (1000, True)


@pytest.mark.parametrize("with_untracked", [False, True])
def test_changes_that_git_cannot_read_are_recorded_as_such(checkout: Path, with_untracked: bool) -> None:
    root = checkout.parents[1]
    blob = git(root, "rev-parse", "HEAD:src/phalanx/gone.py")
    (checkout / "gone.py").write_text("two = 22\n")
    if with_untracked:
        (checkout / "mine.py").write_text("my own\n")
    (root / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    patch = code_patch(checkout, ())
    assert patch is not None
    assert patch.facts() == ({"untracked": ["src/phalanx/mine.py"]} if with_untracked else {}) | {
        "patch_failed": True
    }
