"""Convert a tree of nodes to the value that kubectl would send, with the position of every field.

Aliases are written out, merge keys merged, scalars resolved. Input that kubectl accepts but would silently change or
drop is a problem here: a key set twice, infinities, tags. The work is bounded by the number of nodes after the aliases
are written out, counted as they are, so that a small file that explodes is refused after a fixed number of steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from finetune_operator.documents.nodes import (
    Alias,
    Fields,
    Items,
    Node,
    Position,
    RefusedError,
    Scalar,
    check_depth,
    check_size,
)
from finetune_operator.documents.scalars import JsonScalar, NotResolvableError, as_key, as_stored, resolve
from finetune_operator.spec.problems import PathPart, Problem, Reason, describe_value, format_path

JsonValue = JsonScalar | list["JsonValue"] | dict[str, "JsonValue"]
Path = tuple[PathPart, ...]

MERGE_KEY = "<<"

# go-yaml refuses a document once more than 99 % of over 1,000 steps come from aliases.
_ALIAS_STEPS, _STEPS, _ALIAS_SHARE = 100, 1000, 0.99


def _duplicate_hint(value: Node, empty: str) -> str:
    """Return the hint for a field that is set twice; `empty`: the field above the second one, if it has no value."""
    if empty:
        return f"indent it if it belongs to {empty}, the field above; else remove one of the two"
    return "write the fields of both in one place" if isinstance(value, Fields) else "remove one of the two"


class ValueReader:
    """Reads one document; `problems` and `positions` fill up on the way."""

    def __init__(self) -> None:
        # Keys of a dict, since a merged value that is wrong may be met again at the same field.
        self._problems: dict[Problem, None] = {}
        self.positions: dict[Path, Position] = {}
        self._open: list[Scalar | Items | Fields] = []
        self._open_aliases: list[Alias] = []
        self._steps = 0
        self._alias_steps = 0

    @property
    def problems(self) -> list[Problem]:
        return list(self._problems)

    def read(self, root: Node) -> JsonValue:
        """Return the document's value. A refused value stands in it as its text, next to the problem.

        Raises RefusedError for aliases that contain themselves or explode, and for too deep nesting.
        """
        self.positions[()] = root.position
        return self._value(root, ())

    def _value(self, node: Node, path: Path) -> JsonValue:
        with self._opened(node) as target:
            match target:
                case Scalar():
                    return self._scalar(target, path)
                case Items():
                    return [self._item(item, (*path, index)) for index, item in enumerate(target.items)]
                case Fields():
                    fields: dict[str, JsonValue] = {}
                    self._fill(fields, target, path)
                    return fields

    def _item(self, node: Node, path: Path) -> JsonValue:
        self.positions[path] = node.position
        return self._value(node, path)

    def _scalar(self, node: Scalar, path: Path) -> JsonScalar:
        try:
            return as_stored(resolve(node.text, node.tag, node.plain))
        except NotResolvableError as error:
            hint = "write a plain JSON value, or put text in quotes"
            self._add(node.position, path, node.text, str(error), hint)
            return node.text

    def _fill(self, fields: dict[str, JsonValue], node: Fields, path: Path) -> None:
        """Set the fields of `node` in the order of the text: as for go-yaml, a merge replaces earlier fields."""
        seen: dict[str, Position] = {}
        empty = ""
        """Name of the field above the current one, if that has no value."""
        for key_node, value_node in node.entries:
            if isinstance(key_node, Scalar) and key_node.plain and key_node.text == MERGE_KEY:
                self._merge(fields, value_node, path)
                continue
            key = self._key(key_node, path)
            if key is None:
                continue
            field_path = (*path, key)
            if key in seen:
                earlier = seen[key].line
                self._add(
                    key_node.position,
                    field_path,
                    None,
                    f"a field may be set once; it is already set on line {earlier}",
                    _duplicate_hint(value_node, empty),
                    "Duplicate",
                )
            is_empty = isinstance(value_node, Scalar) and value_node.plain and not value_node.text
            empty = key if is_empty else ""
            seen.setdefault(key, key_node.position)
            self.positions[field_path] = key_node.position
            fields[key] = self._value(value_node, field_path)

    def _merge(self, fields: dict[str, JsonValue], node: Node, path: Path) -> None:
        # A list of sources must stand there itself; go-yaml follows an alias to an object only.
        sources = node.items if isinstance(node, Items) else [node]
        # Backwards, so that the earlier of two sources wins.
        for source in reversed(sources):
            with self._opened(source) as merged:
                if isinstance(merged, Fields):
                    self._fill(fields, merged, path)
                else:
                    rule = f"{MERGE_KEY} merges an object or a list of objects"
                    self._add(source.position, path, None, rule, "merge an object, or quote the field name")

    def _key(self, node: Node, path: Path) -> str | None:
        with self._opened(node) as target:
            hint = "put the field name in quotes"
            if not isinstance(target, Scalar):
                if isinstance(target, Fields):
                    hint = "pass the output of `helm template` for this file: double braces are Helm syntax"
                self._add(node.position, path, None, "a field name must be text, not a list or an object", hint)
                return None
            try:
                return as_key(resolve(target.text, target.tag, target.plain))
            except NotResolvableError as error:
                self._add(node.position, path, target.text, str(error), hint)
                return None

    @contextmanager
    def _opened(self, node: Node) -> Iterator[Scalar | Items | Fields]:
        """Step into a node, through the alias if it is one, and count the step against the limits."""
        self._count(node)
        target: Scalar | Items | Fields
        if isinstance(node, Alias):
            target = node.target
            self._refuse_loop(node)
            self._open_aliases.append(node)
            self._count(node)
        else:
            target = node
        self._open.append(target)
        check_depth(len(self._open) - isinstance(target, Scalar), self._cause(node))
        try:
            yield target
        finally:
            self._open.pop()
            if isinstance(node, Alias):
                self._open_aliases.pop()

    def _cause(self, node: Node) -> Position:
        """Return where a limit is exceeded: at the outermost alias being written out, not in the anchor's text."""
        return self._open_aliases[0].position if self._open_aliases else node.position

    def _count(self, node: Node) -> None:
        self._steps += 1
        check_size(self._steps, self._cause(node))
        if not self._open_aliases:
            return
        self._alias_steps += 1
        many = self._alias_steps > _ALIAS_STEPS and self._steps > _STEPS
        if many and self._alias_steps > _ALIAS_SHARE * self._steps:
            raise RefusedError(
                self._cause(node),
                "aliases must not make up nearly all of a document",
                "write the values in full",
                "NotSupported",
            )

    def _refuse_loop(self, alias: Alias) -> None:
        if any(alias.target is ancestor for ancestor in self._open):
            raise RefusedError(
                alias.position,
                f"the value of the anchor &{alias.name} must not contain the alias *{alias.name}",
                "write the value out in place of the alias",
                "Invalid",
            )

    def _add(
        self, position: Position, path: Path, text: str | None, rule: str, hint: str, reason: Reason = "Invalid"
    ) -> None:
        problem = Problem(
            path=format_path(path),
            value=None if text is None else describe_value(text, path),
            rule=rule,
            remedy=hint,
            line=position.line,
            column=position.column,
            reason=reason,
        )
        self._problems[problem] = None
