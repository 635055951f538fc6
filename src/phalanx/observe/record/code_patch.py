"""What of a checkout a commit does not say: the changes of tracked files as a patch, and the names of files that nobody has added.

A run from a checkout with changes cannot be repeated from its commit; with the patch it can. Files are kept out whose names say that they hold
secrets, what looks like a secret in the rest is masked, and untracked files are named, not copied: they may be data, or anything else. The
patch is bounded, and says when it was cut.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from phalanx.observe.logs.masking import MASKED, Mask, secret_values
from phalanx.observe.record.records import OWN_PACKAGE, git, is_checkout

MOST_BYTES = 4 << 20
_MOST_NAMES = 200
_SECRET_FILE = re.compile(
    r"(^|/)(\.env[^/]*|\.netrc|\.npmrc|id_[a-z0-9]+|[^/]*(secret|credential|token|password)[^/]*|[^/]*\.(pem|key|p12|pfx))$",
    re.I,
)
_QUOTED = re.compile(
    r"((?:secret|passw(?:or)?d|api_?key|access_?key|token(?!iz|s\b))\w*[\"']?\s*[=:]\s*)([\"'])[^\"'\s]{8,}\2",
    re.I,
)
_TOKENS = re.compile(
    r"\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}|gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|xox[abeprs]-[\w-]{10,}|AIza[\w-]{30,})"
    r"|(?<=://)[^\s/'\"@:{}]{1,256}:[^\s/'\"{}]{1,512}(?=@)|(?<=PRIVATE KEY-----)(?:(?!-----)[\s\S]){40,16384}(?=[-+ ]?-----END)"
)
"""For code, narrower than what is masked in logs: code speaks of passwords without holding any, and a patch should apply."""
_FILE_OF_PATCH = re.compile(r"^diff --git ", re.MULTILINE)
_NAME_OF_PATCH = re.compile(r"diff --git .* (?:\"b/(.*)\"|b/(.*))\n")
_CODE_FILE = re.compile(r"\.(py|pyi|c|cc|cpp|cu|h|js|md|toml)$")


@dataclass(frozen=True)
class CodePatch:
    """How the files of a checkout differ from its commit."""

    patch: bytes
    """As ``git apply`` takes it, if neither ``masked`` nor ``cut``."""
    untracked: tuple[str, ...] = ()
    """Files that the commit does not know; their content is not kept."""
    left_out: tuple[str, ...] = ()
    """Changed files whose names say that they hold secrets."""
    masked: bool = False
    """True if something that looked like a secret was replaced, so that the patch may not apply."""
    cut: bool = False

    @property
    def sha256(self) -> str:
        """The hash of the patch; empty if there is none."""
        return hashlib.sha256(self.patch).hexdigest() if self.patch else ""

    def facts(self) -> dict[str, object]:
        """What the record of a run says of it: fields that say nothing are left out."""
        table = {
            "patch_sha256": self.sha256,
            "untracked": list(self.untracked),
            "left_out": list(self.left_out),
            "patch_masked": self.masked,
            "patch_cut": self.cut,
        }
        return {name: value for name, value in table.items() if value}


def code_patch(
    package: Path | None = None, secrets: Collection[str] | None = None, *, max_bytes: int = MOST_BYTES
) -> CodePatch | None:
    """The changes of the checkout that the package runs from; ``None`` if there are none, or it runs from none.

    ``secrets``: values that are masked wherever they stand; those of this process's environment variables if not given.
    ``max_bytes``: Length after which the patch is cut.
    """
    package = package or OWN_PACKAGE
    if not is_checkout(package):
        return None
    root = (git(package, "rev-parse", "--show-toplevel") or "").strip()
    changed = _names(git(Path(root or package), "diff", "HEAD", "--name-only", "-z"))
    untracked = _names(
        git(
            Path(root or package),
            "ls-files",
            "--others",
            "--exclude-standard",
            "-z",
            "--",
            ":/",
            ":(exclude,top)runs",
        )
    )
    if not changed and not untracked:
        return None
    left_out = [name for name in changed if _SECRET_FILE.search(name) and not _CODE_FILE.search(name)]
    shown = [f":(top,literal){name}" for name in changed if name not in left_out]
    text = (
        git(
            Path(root or package),
            "diff",
            "HEAD",
            "--no-color",
            "--no-ext-diff",
            "--no-textconv",
            "--binary",
            "--",
            *shown,
        )
        if shown
        else ""
    )
    masked = _masked(text or "", secret_values(os.environ) if secrets is None else secrets)
    content = masked.encode(errors="surrogateescape")
    return CodePatch(
        patch=content[:max_bytes],
        untracked=tuple(untracked[:_MOST_NAMES]),
        left_out=tuple(left_out[:_MOST_NAMES]),
        masked=masked != (text or ""),
        cut=len(content) > max_bytes,
    )


def _masked(text: str, secrets: Collection[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASKED)
    starts = [0, *(match.start() for match in _FILE_OF_PATCH.finditer(text) if match.start()), len(text)]
    return "".join(_masked_file(text[start:stop]) for start, stop in pairwise(starts))


def _masked_file(patch: str) -> str:
    """The patch of one file. Settings, notes and scripts hold secrets without quotes, so they are masked as logs are."""
    name = _NAME_OF_PATCH.match(patch)
    is_code = name is None or _CODE_FILE.search(name[1] or name[2]) is not None
    if not is_code and "\nGIT binary patch\n" not in patch:
        patch = Mask()(patch)
    return _TOKENS.sub(MASKED, _QUOTED.sub(rf"\1\2{MASKED}\2", patch))


def _names(listed: str | None) -> list[str]:
    return [name for name in (listed or "").split("\0") if name]
