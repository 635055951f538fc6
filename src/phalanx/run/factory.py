"""A user model by name: the location of its source, its digest, and its import by ranks.

A run names its model as ``"package.module:name"``, which every rank can import with any launcher (``multiprocessing`` and ``concurrent.futures`` have the
same rule for functions). The weights depend on the code, so a digest of its source is part of the run's identity. It covers the
module's file and, transitively, the files that it imports from the same folder or package. Installed packages and imports by computed names are
not included.

The source is found and hashed without importing it, because importing a model imports torch, and mistakes in a run file should be reported
before that.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

_FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


_REMEDY = "write a class or a function def in a module of its own (in a notebook: %%writefile my_model.py), import it"


class FactoryError(ValueError):
    """A model's factory cannot be named, found or imported; the message has the reason and a remedy."""


def is_factory_name(name: str) -> bool:
    """Return True if ``name`` has the form ``package.module:name``."""
    return _FORM.fullmatch(name) is not None


def factory_name(factory: object) -> str:
    """Return the ``package.module:name`` with which every rank can import a class or function; a string is returned
    unchanged. Nothing is imported.

    Raises ``FactoryError`` for a malformed name, and for what another process could not import by its name.
    """
    if isinstance(factory, str):
        if not is_factory_name(factory):
            raise FactoryError(f'{factory!r} is no factory: write "package.module:name"')
        _refuse_main(*factory.split(":"))
        return factory
    if not callable(factory) or not hasattr(factory, "__qualname__"):
        raise FactoryError(
            f"an object of type {type(factory).__name__} is no factory of a model, since each rank builds its own: {_REMEDY}, "
            "and give the class or the function itself"
        )
    module, name = str(factory.__module__), str(factory.__qualname__)
    _refuse_main(module, name)
    if not is_factory_name(f"{module}:{name}"):
        raise FactoryError(
            f"the ranks cannot import {module}:{name}, which has no name at module level: {_REMEDY}"
        )
    return f"{module}:{name}"


def _refuse_main(module: str, name: str) -> None:
    """Raise ``FactoryError`` for a name in the running script: ``__main__`` is another module in a rank."""
    if module.partition(".")[0] == "__main__":
        raise FactoryError(
            f"the ranks cannot import {name} from the script or notebook that runs now: {_REMEDY}"
        )


def source_sha256(factory: str) -> str:
    """Return the SHA-256 (hex) of the names, sizes and contents of a factory's module and all modules that it imports,
    directly or not, from the same folder; of an installed package, only its own. Raises ``FactoryError`` without
    source.
    """
    root = search_folder(factory)
    digest = hashlib.sha256()
    for path in sorted(_closure(_module_file(factory), root)):
        digest.update(f"{path.relative_to(root).as_posix()}\n{path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def load_factory(factory: str, sha256: str = "") -> Callable[..., Any]:
    """Import a factory and return it; the folder of its module is appended to ``sys.path``.

    Args:
        factory: Its name.
        sha256: Required digest of its source; empty for any.

    Raises ``FactoryError`` if it cannot be imported, is not callable, or has another source.
    """
    if sha256 and (source := source_sha256(factory)) != sha256:
        raise FactoryError(
            f"the source of {factory} is not the one that this run began with ({source[:12]}, not {sha256[:12]}); restore "
            "it on every machine, or start another run (checkpoint.init_from takes the weights over)"
        )
    folder = str(search_folder(factory))
    if folder not in sys.path:
        sys.path.append(folder)
    module, _, name = factory.partition(":")
    try:
        imported = importlib.import_module(module)
    except (
        Exception,
        SystemExit,
    ) as error:  # the module's code may raise anything; a script without a main guard exits
        raise FactoryError(
            f"model.factory: module {module} cannot be imported: {describe_error(error, factory)}; mend it, or install what it imports, "
            "on every machine"
        ) from error
    loaded: Callable[..., Any] | None = getattr(imported, name, None)
    if loaded is None:
        raise FactoryError(f"model.factory: module {module} has no {name}; correct one of them")
    if not callable(loaded):
        raise FactoryError(
            f"model.factory: {factory} is not callable: name a class, or a function that makes the model"
        )
    return loaded


def describe_error(error: BaseException, factory: str) -> str:
    """Return the ``repr`` of an error that a factory's code raised, with the innermost line of its own files, if any.

    Ranks report an error's message without its traceback.
    """
    return repr(error) + own_line(error, factory)


def own_line(error: BaseException, factory: str) -> str:
    """Return `` (FILE, line N)`` of the innermost line of a factory's own files that raised an error; empty if there is none.

    Files of the same folder that are not installed count as its own. Raises ``FactoryError`` if the module is not found.
    """
    root, top = search_folder(factory), factory.partition(":")[0].partition(".")[0]

    def is_own(file: Path) -> bool:
        if not file.is_relative_to(root):
            return False
        return file.relative_to(root).parts[0].removesuffix(".py") == top or not (
            _is_installed(root) or any(file.is_relative_to(path) for path in _installed_folders())
        )

    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if os.path.isfile(frame.filename) and is_own(Path(frame.filename).resolve())
    ]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def require_trusted(factory: str, sha256: str, run_dir: Path) -> None:
    """Raise ``FactoryError`` if the run in ``run_dir`` names code that the user has not chosen to run.

    This is code without a digest in the run file, code in the run directory, or code of another user's run directory.
    """
    folder, owner = search_folder(factory), run_dir.stat().st_uid
    if not sha256:
        reason = "the run file has no digest of it"
    elif folder.is_relative_to(run_dir.resolve()):
        reason = "it is in the run directory"
    elif owner != os.getuid():
        reason = f"the run directory is another user's (uid {owner})"
    else:
        return
    raise FactoryError(
        f"{run_dir} names code, {factory} in {folder}, and computing with it would run that code: {reason}. Read it, and add --trust-code to run it"
    )


def rank_environment(factory: str) -> dict[str, str]:
    """Return ``PYTHONPATH``, with the factory's folder appended, with which child processes import the same factory
    as this process; empty without a factory.
    """
    if not factory:
        return {}
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([*([before] if before else []), str(search_folder(factory))])}


def search_folder(factory: str) -> Path:
    """Return the folder of the factory's outermost module or package: an entry of ``sys.path``, or the working
    directory.

    Raises ``FactoryError`` if there is no such module, it has no file, or it is the running script.
    """
    module, _, name = factory.partition(":")
    _refuse_main(module, name)
    top = module.partition(".")[0]
    try:
        # A console script does not have the working directory on its path, but ranks (started with -m) do.
        spec = importlib.util.find_spec(top) or PathFinder.find_spec(top, [os.getcwd()])
    except ValueError as error:  # a module created in memory, or in sys.modules without a spec
        raise FactoryError(f"the ranks cannot import {factory}: {error}; {_REMEDY}") from error
    if spec is not None and spec.submodule_search_locations:
        # A package, with __init__.py or without.
        return Path(next(iter(spec.submodule_search_locations))).resolve().parent
    if spec is None or not spec.has_location or spec.origin is None:
        raise FactoryError(
            f"there is no module {top}: install the package, or start in the folder of {top}, on every machine"
        )
    return Path(spec.origin).resolve().parent


def _module_file(factory: str) -> Path:
    """Return the source file of a factory's module. Raises ``FactoryError`` if there is none."""
    module = factory.partition(":")[0]
    file = _file_of(search_folder(factory), module)
    if file is None:
        raise FactoryError(f"there is no module {module} with Python source in {search_folder(factory)}")
    return file


def _file_of(root: Path, module: str) -> Path | None:
    """Return the source of a module below ``root``; ``None`` if it is elsewhere, or is not Python."""
    path = root.joinpath(*module.split("."))
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in candidates if file.is_file()), None)


def _closure(start: Path, root: Path) -> set[Path]:
    """Return ``start`` and its transitive imports from below ``root``; for an installed package, only from the
    package. Raises ``FactoryError`` for a file that cannot be parsed.
    """
    own = start.relative_to(root).parts[0].removesuffix(".py")
    files: set[Path] = set()
    waiting = [start]
    while waiting:
        file = waiting.pop()
        if file in files:
            continue
        files.add(file)
        for module in _imports(file, root):
            if _is_installed(root) and module.partition(".")[0] != own:
                continue
            if (imported := _file_of(root, module)) is not None:
                waiting.append(imported)
    return files


def _imports(file: Path, root: Path) -> Iterator[str]:
    """Yield the absolute names of all modules that a file below ``root`` may import, including its own parent
    packages. Raises ``FactoryError`` if it cannot be read or parsed.
    """
    package = file.relative_to(root).parent.parts
    yield from (".".join(package[:depth]) for depth in range(1, len(package) + 1))
    try:
        tree = ast.parse(file.read_bytes(), file)
    except SyntaxError as error:
        raise FactoryError(f"{file}, line {error.lineno}: {error.msg}") from error
    except ValueError as error:  # null bytes, before Python 3.12
        raise FactoryError(f"{file}: {error}") from error
    except OSError as error:
        raise FactoryError(f"{file} cannot be read: {error.strerror}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join([*base, *([node.module] if node.module else [])])
            if name:
                yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)  # which may be modules


@functools.cache
def _is_installed(root: Path) -> bool:
    return root in _installed_folders()


@functools.cache
def _installed_folders() -> frozenset[Path]:
    return frozenset(Path(path).resolve() for path in sysconfig.get_paths().values())
