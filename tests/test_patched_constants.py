"""No test replaces a constant of a module: a limit that a test has to change is a parameter of what it limits.

A patched constant couples the test to a private name, and hides the limit from a reader of the class or function that has it. So does a
replaced default of a parameter.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
EXCEPTIONS = {"hardware/test_kernels.py": 2, "train/test_data_in_stores.py": 2}
"""Patches that are left, by file. Only smaller numbers and fewer files are allowed."""
DEFAULTS = ("__defaults__", "__kwdefaults__")
CONSTANT = re.compile(rf"(?:.*\.)?(?:_?[A-Z][A-Z0-9_]*|{'|'.join(DEFAULTS)})")
REPLACES = ("setattr", "setitem", "object", "patch", "multiple", "dict")
"""Functions of Python, pytest and ``unittest.mock`` that replace what has a name."""
SUSPECT = re.compile(
    rf"setattr|setitem|patch|vars\(|__dict__|{'|'.join(DEFAULTS)}|\.\s*_?[A-Z][A-Z0-9_]*\b[^()\n]*="
)
"""Text of every file with a patch, so that the others need not be parsed."""


def is_constant(node: ast.expr | None) -> bool:
    """Return True if an expression is the name of a constant in quotes."""
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and bool(CONSTANT.fullmatch(node.value))
    )


def is_namespace(node: ast.expr) -> bool:
    """Return True for ``vars(module)``, ``module.__dict__`` and the defaults of a function."""
    match node:
        case ast.Call(func=ast.Name("vars")):
            return True
        case ast.Attribute(attr=name):
            return name in ("__dict__", *DEFAULTS)
        case _:
            return False


def names_in_call(call: ast.Call, function: str) -> Iterator[bool]:
    """For each name that a call replaces: True if it is a constant's."""
    keywords = [keyword for keyword in call.keywords if keyword.arg]
    if function in ("setitem", "dict"):
        of_namespace = any(map(is_namespace, call.args[:1]))
        yield of_namespace and (is_constant(call.args[1]) if call.args[1:] else False)
        yield from (of_namespace and bool(CONSTANT.fullmatch(keyword.arg or "")) for keyword in keywords)
        return
    yield from map(is_constant, call.args[:2])
    yield from (
        is_constant(keyword.value) for keyword in keywords if keyword.arg in ("name", "attribute", "target")
    )
    if function == "multiple":
        yield from (bool(CONSTANT.fullmatch(keyword.arg or "")) for keyword in keywords)


def patched_constants(tree: ast.AST) -> list[int]:
    """Return the lines on which a constant or a default is replaced: by a call, or by an assignment to an attribute or in a namespace."""
    lines = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(name) | ast.Attribute(attr=name)) if name in REPLACES:
                patched = any(names_in_call(node, name))
            case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()):
                patched = CONSTANT.fullmatch(name) is not None
            case ast.Subscript(value=value, ctx=ast.Store() | ast.Del(), slice=key) if is_namespace(value):
                patched = is_constant(key) or (isinstance(value, ast.Attribute) and value.attr in DEFAULTS)
            case ast.Constant(value=str(text)):
                patched = text.endswith(tuple(f".{name}" for name in DEFAULTS))
            case _:
                patched = False
        if patched:
            lines.append(node.lineno)
    return sorted(set(lines))


def test_no_test_replaces_a_constant_and_the_exceptions_are_no_more_than_are_needed() -> None:
    texts = {
        str(path.relative_to(HERE)): path.read_text() for path in HERE.rglob("*.py") if path != Path(__file__)
    }
    suspects = {path: text for path, text in texts.items() if SUSPECT.search(text)}
    lines = {
        path: patches for path, text in suspects.items() if (patches := patched_constants(ast.parse(text)))
    }
    assert {path: len(patches) for path, patches in lines.items()} == EXCEPTIONS, lines


def test_constants_are_recognized_however_they_are_replaced() -> None:
    for line in (
        'monkeypatch.setattr(server, "_PAUSE_S", 0.1)',
        'monkeypatch.setattr(server, name="_PAUSE_S", value=0.1)',
        'monkeypatch.setattr("phalanx.store.store._UNKNOWN_S", 0.1)',
        'setattr(server, "PAUSE_S", 0.1)',
        'setattr(Prefetch.__init__, "__defaults__", (1,))',
        'patch.object(blocks, "BLOCK", 1)',
        'patch.object(blocks, attribute="BLOCK", new=1)',
        "patch.multiple(blocks, BLOCK=1)",
        'patch.multiple("phalanx.observe.logs.read_blocks", BLOCK=1)',
        'mock.patch("phalanx.observe.logs.read_blocks.BLOCK", 1)',
        'mock.patch(target="phalanx.observe.logs.read_blocks.BLOCK", new=1)',
        'monkeypatch.setitem(vars(server), "PAUSE_S", 0.1)',
        'monkeypatch.setitem(server.__dict__, "PAUSE_S", 0.1)',
        "patch.dict(vars(server), PAUSE_S=0.1)",
        'vars(server)["PAUSE_S"] = 0.1',
        'del server.__dict__["PAUSE_S"]',
        "limit, matrices.BATCH_ELEMENTS = matrices.BATCH_ELEMENTS, 50",
        "checksum._ROWS_AT_ONCE = {}",
        "offload.__defaults__ = (1,)",
        'Prefetch.__init__.__kwdefaults__["told_first_s"] = 0.5',
        'FLAW = ("phalanx.train.activations", "offload_activations.__defaults__", (1,))',
    ):
        assert patched_constants(ast.parse(line)) == [1], line
        assert SUSPECT.search(line), line
    for line in (
        'monkeypatch.setattr(os, "getuid", lambda: 0)',
        'monkeypatch.setattr("phalanx_watch.lookout.reasons", None)',
        'monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")',
        'monkeypatch.setitem(os.environ, "XDG_CACHE_HOME", "/nowhere")',
        'monkeypatch.setitem(vars(server), "reasons", None)',
        "patch.multiple(blocks, read=None)",
        'vars(runner)["gradients"] = None',
        "model.head = None",
        "limit = matrices.BATCH_ELEMENTS",
    ):
        assert not patched_constants(ast.parse(line)), line
