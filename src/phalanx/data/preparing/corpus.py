"""Named corpora: training text that every machine has.

A corpus is documents in a fixed order, each with a name that does not depend on where the files lie, since the name
decides which split a document falls into. The user's own files are ``phalanx.data.preparing.files``'s.
"""

import difflib
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from phalanx.data.errors import CorpusError
from phalanx.data.formats.document import Document
from phalanx.run.directory.files import files_below

# Tests and other people's bundled packages vary with how a Python was installed; what is left is the library itself.
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "_bundled", "__pycache__"}
)


def python_stdlib() -> list[Document]:
    """The source code of this Python's own standard library: some 10 MB of text that every machine has.

    In order of file name, without tests, bundled packages, files written by the build, and files that are not UTF-8.
    The same Python release gives the same documents.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    sources = (path.relative_to(root) for path in files_below(root) if path.suffix == ".py")
    for relative in sorted(sources, key=Path.as_posix):
        if _NOT_LIBRARY & set(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        try:
            documents.append(
                Document(f"python_stdlib/{relative.as_posix()}", (root / relative).read_bytes().decode())
            )
        except UnicodeDecodeError:
            continue
    return documents


CORPORA: Mapping[str, Callable[[], list[Document]]] = MappingProxyType({"python-stdlib": python_stdlib})


def named_corpus(name: str) -> list[Document]:
    """The documents of a corpus by its name in ``CORPORA``. Raises ``CorpusError`` for an unknown one."""
    if name not in CORPORA:
        close = difflib.get_close_matches(name, CORPORA, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(CORPORA)}"
        raise CorpusError(
            f"no corpus is called {name!r}; {hint}. There is no such file or folder in {Path.cwd()} either: give the path from there"
        )
    return CORPORA[name]()
