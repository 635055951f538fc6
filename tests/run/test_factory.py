"""A user's own model by name: found without importing it, identified by its source, refused where no rank could import it."""

from __future__ import annotations

import functools
import os
import sys
import types
from pathlib import Path

import pytest

from phalanx.run.factory import (
    FactoryError,
    factory_name,
    load_factory,
    rank_environment,
    require_trusted,
    search_folder,
    source_sha256,
)


def defined_here() -> None:
    """Something that can be imported."""


class Holder:
    """A class, whose methods are no names at module level."""

    def method(self) -> None:
        """Cannot be named."""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``own_package.models.small:make``, which imports a module beside it and one from the package above."""
    folder = tmp_path / "own_package"
    (folder / "models").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "shared.py").write_text("WIDTH = 3\n")
    (folder / "unused.py").write_text("raise RuntimeError('never imported')\n")
    (folder / "models" / "layers.py").write_text("from ..shared import WIDTH\n")
    (folder / "models" / "small.py").write_text(
        "import os\nfrom .layers import WIDTH\ndef make(spec): return WIDTH\n"
    )
    (folder / "models" / "broken.py").write_text("raise AttributeError('unfinished')\n")
    (folder / "models" / "script.py").write_text("import sys\n\nsys.exit(2)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_a_class_and_a_function_are_named_as_ranks_import_them() -> None:
    assert factory_name(Holder) == f"{__name__}:Holder"
    assert factory_name(defined_here) == f"{__name__}:defined_here"
    assert factory_name("pkg.module:Model") == "pkg.module:Model"


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda _spec: None, "no name at module level"),
        (Holder().method, "no name at module level"),
        (functools.partial(defined_here), "partial"),
        (Holder(), "each rank builds its own"),
        ("module", "package.module:name"),
        ("module:make()", "package.module:name"),
    ],
)
def test_what_another_process_cannot_import_is_refused_with_the_reason(factory: object, message: str) -> None:
    with pytest.raises(FactoryError, match=message):
        factory_name(factory)


def test_a_class_of_the_running_script_is_refused() -> None:
    in_notebook = type("Mine", (), {"__module__": "__main__"})
    for refused in (in_notebook, "__main__:Mine"):
        with pytest.raises(
            FactoryError, match=r"cannot import Mine from the script.*%%writefile my_model.py"
        ):
            factory_name(refused)
    with pytest.raises(FactoryError, match=r"%%writefile my_model.py"):
        source_sha256("__main__:Mine")  # as a run file names it


def test_a_module_that_was_made_in_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made_in_memory", types.ModuleType("made_in_memory"))
    with pytest.raises(FactoryError, match=r"cannot import made_in_memory:Mine"):
        source_sha256("made_in_memory:Mine")


def test_the_digest_is_of_all_source_that_the_model_imports_from_its_folder_and_of_no_other(
    package: Path,
) -> None:
    factory = "own_package.models.small:make"
    before = source_sha256(factory)
    (package / "unused.py").write_text("")
    assert source_sha256(factory) == before
    for file in ("shared.py", "models/layers.py", "models/small.py", "__init__.py"):
        path = package / file
        written = path.read_text()
        path.write_text(written + "# changed\n")
        assert source_sha256(factory) != before, file
        path.write_text(written)
    assert source_sha256(factory) == before
    assert "own_package" not in sys.modules, "found without importing it"


def test_a_factory_whose_source_has_changed_is_not_loaded(package: Path) -> None:
    factory = "own_package.models.small:make"
    sha256 = source_sha256(factory)
    assert load_factory(factory, sha256)(None) == 3
    (package / "shared.py").write_text("WIDTH = 4\n")
    with pytest.raises(FactoryError, match="not the one that this run began with"):
        load_factory(factory, sha256)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("no_such_module_anywhere:make", "there is no module no_such_module_anywhere"),
        ("own_package.models.large:make", r"own_package\.models\.large cannot be imported"),
        ("own_package.models.broken:make", r"broken cannot be imported: AttributeError\('unfinished'\)"),
        ("own_package.models.broken:make", r"\(.*own_package/models/broken\.py, line \d+\); mend it"),
        ("own_package.models.script:make", r"SystemExit\(2\) \(.*own_package/models/script\.py, line 3\)"),
        ("own_package.models.small:build", "model.factory: .* has no build; correct"),
        ("own_package.models.small:WIDTH", "not callable"),
    ],
)
@pytest.mark.usefixtures("package")
def test_a_factory_that_is_not_there_is_explained(factory: str, message: str) -> None:
    with pytest.raises(FactoryError, match=message):
        load_factory(factory)


@pytest.mark.parametrize(
    ("source", "problem"),
    [(b"def make(spec):\n  return (\n", r"no_python\.py, line 2: .* never closed"), (b"\0", "null bytes")],
)
def test_source_that_is_no_python_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: bytes, problem: str
) -> None:
    (tmp_path / "no_python.py").write_bytes(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(FactoryError, match=problem):
        source_sha256("no_python:make")


@pytest.mark.usefixtures("package")
def test_source_that_is_not_there_has_no_digest() -> None:
    with pytest.raises(FactoryError, match=r"no module own_package\.models\.large with Python source"):
        source_sha256("own_package.models.large:make")


def test_a_module_in_the_working_directory_is_found_and_handed_on_to_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("make = list\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setenv("PYTHONPATH", "/first")
    assert search_folder("only_here:make") == tmp_path.resolve()
    assert rank_environment("only_here:make") == {
        "PYTHONPATH": os.pathsep.join(["/first", str(tmp_path.resolve())])
    }
    assert rank_environment("") == {}


@pytest.mark.usefixtures("package")
def test_code_of_a_run_is_trusted_where_its_owner_has_a_digest_of_it_elsewhere(tmp_path: Path) -> None:
    factory, run, of_another_user = "own_package.models.small:make", tmp_path / "run", Path("/usr/bin")
    run.mkdir()
    if os.getuid() == 0:
        of_another_user = tmp_path / "other"
        of_another_user.mkdir()
        os.chown(of_another_user, 12345, -1)
    digest = source_sha256(factory)
    require_trusted(factory, digest, run)
    for sha256, folder, reason in (
        ("", run, "the run file has no digest of it"),
        (digest, search_folder(factory), "it is in the run directory"),
        (digest, of_another_user, "another user's"),
    ):
        with pytest.raises(FactoryError, match=f"own_package.*{reason}.*--trust-code"):
            require_trusted(factory, sha256, folder)
