"""References of the tests' own Python files: imports at any depth, modules named in text, files and folders read by
path. Text in, names out; nothing is imported or run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

HERE = "__file__"
PATH_NODES = (ast.Name, ast.Call, ast.Attribute, ast.Subscript, ast.BinOp)
WORKING_FOLDERS = ("", "tests")
"""Working directories and import roots of processes: a path to one of them does not mean that all of it is read."""


@dataclass(frozen=True)
class Folder:
    """Value of a path expression: a place in the repository; "" is its root."""

    path: str
    exact: bool = True
    """False after a part that is known only at run time: later parts do not count."""

    def parent(self, levels: int = 1) -> Folder | None:
        """Return the parent folder; None outside the repository."""
        parts = PurePosixPath(self.path).parts
        return Folder("/".join(parts[: len(parts) - levels])) if levels <= len(parts) else None

    def join(self, part: str) -> Folder:
        return Folder(str(PurePosixPath(self.path) / part)) if self.exact else self


@dataclass
class References:
    """References of a file or of one of its top-level definitions."""

    modules: set[str] = field(default_factory=set)
    """Dotted names: `import a` gives `a`, `from a import b` gives `a.b`."""
    texts: set[str] = field(default_factory=set)
    """String constants, without docstrings."""
    paths: set[str] = field(default_factory=set)
    """Files and folders of the repository in path expressions."""
    names: set[str] = field(default_factory=set)
    """Names that are read, and names of parameters, by which pytest requests fixtures."""
    programs: set[str] = field(default_factory=set)
    """Programs beside the interpreter: `Path(sys.executable).with_name("finetune")`."""


@dataclass
class Source:
    """A parsed file."""

    whole: References
    definitions: dict[str, References]
    """References by the name of a top-level function, class, constant or import."""
    rest: References
    """References of top-level statements that define nothing: they run at every import of the file."""
    always: set[str]
    """Definitions that pytest uses without a request: hooks and fixtures with autouse."""


Constants = Mapping[str, Folder]


def parse(path: str, tree: ast.Module, known: Mapping[str, Constants] | None = None) -> Source:
    """Collect the references of a file. `known`: constants that are paths, by module, for files that import them."""
    constants = path_constants(path, tree, known or {})
    source = Source(References(), {}, References(), set())
    for statement in tree.body:
        found = _references(statement, constants, path)
        _add(source.whole, found)
        names = set(_bound(statement))
        if not names:
            _add(source.rest, found)
        for name in names:
            _add(source.definitions.setdefault(name, References()), found)
            if name.startswith("pytest_") or _is_autouse(statement):
                source.always.add(name)
    return source


def path_constants(path: str, tree: ast.Module, known: Mapping[str, Constants]) -> dict[str, Folder]:
    """Return the constants of a file, its own and imported ones, that are paths within the repository."""
    constants = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                if alias.name in known[node.module]:
                    constants[alias.asname or alias.name] = known[node.module][alias.name]
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = _value(node.value, constants, path)
            if value is not None:
                constants[node.targets[0].id] = value
    return constants


def _value(node: ast.AST, constants: Constants, path: str) -> Folder | None:
    """Return the value of a path expression, up to the first part that constants do not determine."""
    match node:
        case ast.Name(id=name):
            return constants.get(name)
        case ast.Call(func=ast.Name(id="Path"), args=[ast.Name(id=name)]) if name == HERE:
            return Folder(path)
        case ast.Call(func=ast.Attribute(value=inner, attr="resolve" | "absolute")):
            return _value(inner, constants, path)
        case ast.Attribute(value=inner, attr="parent"):
            inner_folder = _value(inner, constants, path)
            return inner_folder and inner_folder.parent()
        case ast.Subscript(value=ast.Attribute(value=inner, attr="parents"), slice=ast.Constant(value=int(level))):
            inner_folder = _value(inner, constants, path)
            return inner_folder and inner_folder.parent(level + 1)
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=str(part))):
            inner_folder = _value(left, constants, path)
            return inner_folder and inner_folder.join(part)
        case ast.BinOp(left=left, op=ast.Div()):
            inner_folder = _value(left, constants, path)
            return inner_folder and replace(inner_folder, exact=False)
        case _:
            return None


def _references(root: ast.AST, constants: Constants, path: str) -> References:
    found = References()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.Expr(value=ast.Constant()):  # a docstring
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=orelse):  # its body never runs
                waiting += orelse
                continue
            case ast.Import(names=names):
                found.modules |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module), names=names, level=0):
                found.modules |= {f"{module}.{alias.name}" for alias in names}
            case ast.Constant(value=str(text)):
                found.texts.add(text)
            case ast.arg(arg=name):
                found.names.add(name)
            case ast.Name(id=name, ctx=ast.Load()):
                found.names.add(name)
            case ast.Call(func=ast.Attribute(value=folder, attr="with_name"), args=[ast.Constant(value=str(name))]):
                found.programs |= {name} if _is_interpreter(folder) else set()
            case ast.BinOp(left=folder, op=ast.Div(), right=ast.Constant(value=str(name))):
                found.programs |= {name} if _is_interpreter(folder) else set()
        place = _value(node, constants, path) if isinstance(node, PATH_NODES) else None
        if place is None:
            waiting += ast.iter_child_nodes(node)
            continue
        # Only the longest expression counts: a constant folder is not read as a whole if a file in it is named.
        found.paths.add(place.path)
        found.names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - {HERE}
        found.texts |= _texts(node)
    found.paths -= {path, *WORKING_FOLDERS}
    return found


def _texts(node: ast.AST) -> set[str]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def _is_interpreter(node: ast.AST) -> bool:
    return "sys.executable" in ast.unparse(node)


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a top-level statement binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            yield (alias.asname or alias.name).split(".")[0]
    else:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def _is_autouse(statement: ast.stmt) -> bool:
    decorators = getattr(statement, "decorator_list", [])
    calls = [each for each in decorators if isinstance(each, ast.Call)]
    return any(keyword.arg == "autouse" for call in calls for keyword in call.keywords)


def _add(to: References, more: References) -> None:
    to.modules |= more.modules
    to.texts |= more.texts
    to.paths |= more.paths
    to.names |= more.names
    to.programs |= more.programs
