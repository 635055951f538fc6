"""Mutants: copies of a module with one small change each.

A comparison is turned around or moved by one, an operand dropped, a constant one off, ``min`` put for ``max``, a keyword
argument or a whole statement left out, a condition negated. Annotations, decorators and the texts of messages stay.
The kinds are the usual ones (Offutt et al., "An experimental determination of sufficient mutant operators", TOSEM 1996),
with at most two neighbors for each operator: a test that distinguishes ``+`` from ``-`` would distinguish it from ``%`` too.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

NEIGHBORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,), ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.FloorDiv,), ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,), ast.Mod: (ast.FloorDiv,), ast.Pow: (ast.Mult,), ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,), ast.BitOr: (ast.BitAnd,), ast.BitAnd: (ast.BitOr,), ast.BitXor: (ast.BitOr,),
    ast.And: (ast.Or,), ast.Or: (ast.And,), ast.Break: (ast.Continue,), ast.Continue: (ast.Break,),
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Raise, ast.Return, ast.If, ast.For, ast.While)
UNTOUCHED = ("annotation", "returns", "decorator_list", "ctx")


def alternatives(node: ast.AST, in_function: bool) -> Iterator[ast.AST]:
    """Yield the code that a mutant has in the place of ``node``."""
    for neighbor in NEIGHBORS.get(type(node), ()):
        yield neighbor()
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield from (ast.Constant(node.value + 1), ast.Constant(node.value - 1))
    elif isinstance(node, ast.Name) and node.id in NAMES:
        yield ast.Name(NAMES[node.id])
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.BoolOp):
        for left_out in node.values:
            rest = [value for value in node.values if value is not left_out]
            yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.Call):
        for keyword in node.keywords:
            yield ast.Call(node.func, node.args, [other for other in node.keywords if other is not keyword])
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield ast.comprehension(node.target, node.iter, [], node.is_async)
    elif isinstance(node, ast.If | ast.While):
        yield type(node)(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if in_function and isinstance(node, DROPPED) and not is_docstring:
        yield ast.Pass()


@dataclass(frozen=True)
class Mutant:
    """One changed module: in function ``place``, ``before`` and ``after`` are the statement concerned, ``source`` is the full text."""

    line: int
    place: str
    before: str
    after: str
    nth: int
    """Number among the mutants with equal ``place``, ``before`` and ``after``."""
    source: str


def mutants(source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module, from top to bottom."""
    tree, original = ast.parse(source), ast.unparse(ast.parse(source))
    seen, alike = {original}, Counter[tuple[str, str, str]]()

    def visit(owner: ast.AST, line: int, place: str) -> Iterator[Mutant]:
        for field, value in ast.iter_fields(owner):
            if field in UNTOUCHED or isinstance(owner, ast.JoinedStr):
                continue
            children = value if isinstance(value, list) else [value]
            for index, child in enumerate(children):
                if not isinstance(child, ast.AST):
                    continue
                here = getattr(child, "lineno", line)
                for other in alternatives(child, bool(place)):
                    changed = [*children[:index], other, *children[index + 1 :]]
                    setattr(owner, field, changed if isinstance(value, list) else other)
                    text = ast.unparse(ast.fix_missing_locations(tree))
                    setattr(owner, field, value)
                    if text not in seen:
                        seen.add(text)
                        change = (place, *difference(original, text))
                        alike[change] += 1
                        yield Mutant(here, *change, alike[change], text)
                yield from visit(child, here, child.name if isinstance(child, ast.FunctionDef) else place)

    return visit(tree, 0, "")


def difference(original: str, text: str) -> tuple[str, str]:
    """Return the lines of two texts that differ, without their common start and end."""
    before, after = original.splitlines(), text.splitlines()
    start = next(
        i for i, (old, new) in enumerate(zip([*before, ""], [*after, ""], strict=False)) if old != new
    )
    back = zip(reversed(before[start:]), reversed(after[start:]), strict=False)
    end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], back))
    cut = [lines[start : len(lines) - end] for lines in (before, after)]
    return tuple(" ".join(map(str.strip, lines)) for lines in cut)  # type: ignore[return-value]
