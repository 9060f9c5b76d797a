"""Small wrong changes of Python sources: where they can be made, and the text with one made."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
}
_ARITHMETIC: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.FloorDiv(),
    ast.FloorDiv: ast.Mult(),
}
# What only tells people something: no test should hang on it.
_TELLS = ("debug", "info", "warning", "error", "exception", "warn")


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        id: of the change, which other functions of the file do not change.
        function: that it is in, with the names around it; empty where an import runs it.
        first, last: the lines whose run runs what is changed; those of all the function for its
            defaults.
        start, end: offsets in the file's UTF-8 bytes.
        before, after: the replaced text and what replaces it.
    """

    id: str
    path: str
    function: str
    line: int
    first: int
    last: int
    operator: str
    start: int
    end: int
    before: str
    after: str

    def apply(self, source: bytes) -> bytes:
        """The file's text with the change.

        Raises:
            ValueError: when the file does not have `before` at its place.
        """
        if source[self.start : self.end].decode() != self.before:
            raise ValueError(f"{self.path}:{self.line} is no longer {self.before!r}")
        return source[: self.start] + self.after.encode() + source[self.end :]


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """All changes of a file, in its order. A few do not compile."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    mutants = []
    seen: Counter[tuple[str, ...]] = Counter()
    for place, operator, after in _changes(ast.parse(source)):
        node, function = place.node, place.function
        assert isinstance(node, (ast.expr, ast.stmt))
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        before = source[start:end].decode()
        key = path, function, operator, before, after
        name = hashlib.sha256("\0".join([*key, str(seen[key])]).encode()).hexdigest()[:12]
        seen[key] += 1
        rows = place.first, place.last
        mutants.append(
            Mutant(name, path, function, node.lineno, *rows, operator, start, end, before, after)
        )
    return mutants


def compiles(source: bytes) -> bool:
    """Whether a file's text is Python at all."""
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


@dataclass(frozen=True)
class _Place:
    """A node and what is around it: `function`, `first` and `last` are those of a `Mutant`."""

    node: ast.AST
    names: tuple[str, ...] = ()
    in_function: bool = False
    first: int = 0
    last: int = 0

    @property
    def function(self) -> str:
        return ".".join(self.names) if self.in_function else ""

    def within(self, child: ast.AST) -> _Place:
        """The place of a child."""
        place = dataclasses.replace(self, node=child)
        if isinstance(self.node, _NAMED):
            # Defaults are computed where the function is defined, and used in it.
            place = dataclasses.replace(
                place,
                names=(*self.names, self.node.name),
                in_function=self.in_function or not isinstance(self.node, ast.ClassDef),
            )
        if isinstance(child, ast.stmt):
            place = dataclasses.replace(place, first=child.lineno, last=_end_of_head(child))
        return place


def _changes(tree: ast.Module) -> Iterator[tuple[_Place, str, str]]:
    """Place, operator, and what replaces the place's node."""
    for place in _acting(_Place(tree)):
        node = place.node
        if isinstance(node, ast.expr):
            for operator, changed in _changed_expressions(node):
                # Operators bind as they did only within parentheses.
                yield place, operator, f"({ast.unparse(changed)})"
        elif isinstance(node, ast.stmt):
            for inner, operator, after in _changed_statements(node):
                if inner is node or isinstance(inner, ast.expr):
                    yield dataclasses.replace(place, node=inner), operator, after
                else:
                    yield place.within(inner), operator, after


def _acting(place: _Place) -> Iterator[_Place]:
    """The nodes that decide what a program does: no annotations, texts, messages or imports."""
    yield place
    for field, value in ast.iter_fields(place.node):
        if field in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _only_tells(child):
                yield from _acting(place.within(child))


_NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _end_of_head(node: ast.stmt) -> int:
    """The last line of what a statement computes before the statements in it."""
    end = node.end_lineno or node.lineno
    body = getattr(node, "body", None)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or not body:
        return end
    inner = body[0]
    return max(node.lineno, (inner.lineno if isinstance(inner, ast.stmt) else end + 1) - 1)


def _only_tells(node: ast.AST) -> bool:
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Assert)):
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr in _TELLS
    )


def _changed_expressions(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            ops = [*node.ops[:i], _COMPARISONS[type(op)], *node.ops[i + 1 :]]
            yield "comparison", ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and/or", ast.BoolOp(other, node.values)
        for i in range(len(node.values)):
            left = [*node.values[:i], *node.values[i + 1 :]]
            yield "condition", left[0] if len(left) == 1 else ast.BoolOp(node.op, left)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node.operand
    elif isinstance(node, ast.IfExp):
        yield "not", ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        if not _is_text(node.left) and not _is_text(node.right):
            yield "arithmetic", ast.BinOp(node.left, _ARITHMETIC[type(node.op)], node.right)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "+1", ast.Constant(node.value + 1)
        yield "-1", ast.Constant(node.value - 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "not", ast.Constant(not node.value)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    )


def _changed_statements(node: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    if isinstance(node, (ast.If, ast.While)) and not isinstance(node.test, ast.Constant):
        yield node.test, "not", f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Return) and not _is_none(node.value):
        yield node, "return None", "return None"
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if len(body) > 1 and node.name != "__init__" and not isinstance(body[0], ast.FunctionDef):
            yield body[0], "early return", "return None"
    elif _is_effect(node):
        yield node, "dropped", "pass"


def _is_effect(node: ast.stmt) -> bool:
    """A statement without which names are bound as before."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, (ast.Call, ast.Await))
    if isinstance(node, (ast.Assign, ast.Delete)):
        return not all(map(_is_name, node.targets))
    return isinstance(node, (ast.Raise, ast.AugAssign, ast.Break, ast.Continue))


def _is_name(target: ast.expr) -> bool:
    if isinstance(target, (ast.Tuple, ast.List)):
        return all(map(_is_name, target.elts))
    return isinstance(target, ast.Name)


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)
