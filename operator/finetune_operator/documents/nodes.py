"""The text of one document as a tree of nodes with positions, before any value is resolved.

PyYAML scans and parses; of its layers only the event stream is used, because the composer above it recurses
without a limit and its resolver reads scalars in PyYAML's way. JSON text is read here by JSON's own rules,
as kubectl does, since YAML differs in escapes, tabs and some line breaks; it gives the same nodes. Building
a tree stops at the first syntax error, at too deep nesting and at too many nodes, so that no file can cost
more than its size.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from json import JSONDecodeError, JSONDecoder
from typing import Protocol

import yaml

from finetune_operator.documents.scalars import STANDARD_TAG, tag_shown
from finetune_operator.spec.problems import MAX_DEPTH, Problem, Reason

_SURROGATE = re.compile("[\ud800-\udfff]")

MAX_NODES = 100_000
"""Nodes of one document, or of one stream of JSON objects, with the aliases written out: some 20 times the
nodes of a job file with a long pod template, and read within a second."""


@dataclass(frozen=True)
class Position:
    """A place in the file, in lines and characters from 1."""

    line: int
    column: int


@dataclass(frozen=True, eq=False, slots=True)
class Scalar:
    position: Position
    text: str
    tag: str | None
    plain: bool
    """True if written without quotes, so that its text decides its type."""


@dataclass(frozen=True, eq=False, slots=True)
class Items:
    position: Position
    items: list["Node"] = field(default_factory=list)


@dataclass(frozen=True, eq=False, slots=True)
class Fields:
    position: Position
    entries: list[tuple["Node", "Node"]] = field(default_factory=list)


@dataclass(frozen=True, eq=False, slots=True)
class Alias:
    position: Position
    name: str
    target: "Scalar | Items | Fields"


Node = Scalar | Items | Fields | Alias


class _Mark(Protocol):
    """Common attributes of PyYAML's two kinds of mark."""

    @property
    def line(self) -> int: ...

    @property
    def column(self) -> int: ...


class RefusedError(Exception):
    """A document that cannot be read any further."""

    def __init__(
        self, position: Position, rule: str, hint: str, reason: Reason = "Syntax", *, repaired: str | None = None
    ) -> None:
        super().__init__(rule)
        self.repaired = repaired
        """Text of the document as the hint would have it; None: the hint leaves a choice."""
        self.problem = Problem(
            path="",
            value=None,
            rule=rule,
            remedy=hint,
            line=position.line,
            column=position.column,
            reason=reason,
        )


def check_depth(depth: int, position: Position) -> None:
    """Raise RefusedError where the nesting passes MAX_DEPTH."""
    if depth > MAX_DEPTH:
        raise RefusedError(
            position,
            f"a document must nest at most {MAX_DEPTH} levels deep",
            "reduce the nesting here",
            "NotSupported",
        )


def check_size(nodes: int, position: Position) -> None:
    """Raise RefusedError where a document has more than MAX_NODES nodes."""
    if nodes > MAX_NODES:
        raise RefusedError(
            position,
            f"a document must have at most {MAX_NODES} values, including those that aliases repeat",
            "use fewer aliases, or split the file",
            "NotSupported",
        )


_COLLECTION_TAGS = {
    yaml.SequenceStartEvent: frozenset({None, "!", f"{STANDARD_TAG}seq"}),
    yaml.MappingStartEvent: frozenset({None, "!", f"{STANDARD_TAG}map"}),
}
# libyaml is the scanner that go-yaml was ported from, and about 10 times as fast as PyYAML's own.
_LOADER: type = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


_BACKSLASH = "put text that contains a backslash in single quotes, and close the quotes"
_SYNTAX_HINTS = (
    ("start any token", "indent with spaces if this is a tab; put text that begins with this character in quotes"),
    (
        "mapping values are not allowed",
        "check the indentation, put a space after each colon, and put text that contains ': ' in quotes",
    ),
    (
        "expected ',' or",
        "put a comma between two fields, or close the bracket or brace that is still open",
    ),
    ("expected hex", _BACKSLASH),
    ("escape ", _BACKSLASH),
    ("could not find expected ':'", "write `name: value`, with a colon and a space"),
    ("expected key", "check that fields of one object start in the same column"),
    ("block mapping", "check that fields of one object start in the same column, and that quotes are closed"),
    ("end of stream", "close the quote, bracket or brace that is still open"),
    ("document start", "remove the text after the document, or separate documents with a line `---`"),
    ("alias", "define the anchor with `&` above the alias, in the same document"),
)


_SLASHES = re.compile(r"^[ \t]*(?=//)", re.MULTILINE)
"""Start of a comment as in other languages."""


def _check_surrogates(text: str, position: Position) -> None:
    if _SURROGATE.search(text):
        raise RefusedError(
            position,
            "an escape must name a character, not half of a surrogate pair",
            "write the character itself",
        )


def compose_yaml(text: str, first_line: int) -> Node | None:
    """Return the tree of the one YAML document in `text`, which starts at line `first_line` of the file; None if it is
    empty.

    Raises RefusedError for syntax errors, unknown anchors, tags on collections, too deep nesting and too many nodes.
    Content after the document's end (`...`), which kubectl drops silently, is a syntax error.
    """
    try:
        return _Composer(first_line).compose(yaml.parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as error:
        mark, context = error.problem_mark or error.context_mark, error.context_mark
        detail = ", ".join(part for part in (error.context, error.problem) if part)
        if mark is not None and context is not None and context.line != mark.line:
            detail += f"; it begins on line {_place(context, first_line).line}"
        rule = f"the text must be YAML or JSON: {detail}"
        hint, repaired = _repair_hint(text, rule, first_line, mark, context)
        raise RefusedError(_place(mark, first_line), rule, hint, repaired=repaired) from error


def _repair_hint(
    text: str, rule: str, first_line: int, mark: _Mark | None, context: _Mark | None
) -> tuple[str, str | None]:
    """Return the hint for a syntax error, and the text as the hint would have it, if that is certain."""
    if "{{" in text:
        return "pass the output of `helm template` for this file: double braces are Helm syntax", None
    comment = _SLASHES.search(text)
    if comment is not None:
        line = first_line + text.count("\n", 0, comment.start())
        return f"remove the comment in line {line}: JSON has none, and YAML's begin with #", None
    from finetune_operator.documents.repairs import repair

    begin = mark.line if mark is not None and context is None else 0 if context is None else context.line
    fix = None if mark is None or len(text) > _LONGEST_REPAIRED else repair(text, mark.line, begin, _error_line)
    if fix is not None:
        return fix.hint(first_line), fix.text
    return next((hint for sign, hint in _SYNTAX_HINTS if sign in rule), "correct the YAML at this line"), None


_LONGEST_REPAIRED = 65_536
"""Characters above which no repair is tried: each try reads the text again."""


def _error_line(text: str) -> int | None:
    """Return the line of the first syntax error, from 0; None: there is none."""
    try:
        for _ in yaml.parse(text, Loader=_LOADER):
            pass
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        return 0 if mark is None else int(mark.line)
    except yaml.YAMLError:
        return 0
    return None


def _place(mark: _Mark | None, first_line: int) -> Position:
    """Convert a PyYAML mark, from 0 within the document, to a position in the file; None: the first line."""
    return Position(first_line, 1) if mark is None else Position(first_line + mark.line, mark.column + 1)


class _Composer:
    """Builds nodes from events, with its own stack of open collections."""

    def __init__(self, first_line: int) -> None:
        self._first_line = first_line
        self._anchors: dict[str, Scalar | Items | Fields] = {}
        self._open: list[tuple[Items | Fields, list[Node]]] = []
        self._root: Node | None = None
        self._nodes = 0

    def compose(self, events: Iterator[yaml.Event]) -> Node | None:
        documents = 0
        for event in events:
            match event:
                case yaml.DocumentStartEvent():
                    documents += 1
                    if documents > 1:
                        raise RefusedError(
                            self._position(event),
                            "`---` separates documents after a line feed only; kubectl reads nothing more here",
                            "end the line before with a line feed, not with a carriage return or U+2028 alone",
                        )
                case yaml.ScalarEvent():
                    self._add(self._scalar(event))
                case yaml.AliasEvent():
                    self._add(self._alias(event))
                case yaml.SequenceStartEvent() | yaml.MappingStartEvent():
                    self._begin(event)
                case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                    self._end()
        return self._root

    def _position(self, event: yaml.Event) -> Position:
        return _place(event.start_mark, self._first_line)

    def _scalar(self, event: yaml.ScalarEvent) -> Scalar:
        scalar = Scalar(self._position(event), event.value, event.tag, plain=bool(event.implicit[0]))
        _check_surrogates(event.value, scalar.position)
        self._register(event.anchor, scalar)
        return scalar

    def _alias(self, event: yaml.AliasEvent) -> Alias:
        position = self._position(event)
        name = str(event.anchor)
        target = self._anchors.get(name)
        if target is None:
            raise RefusedError(
                position,
                f"the alias *{name} has no anchor &{name} before it",
                "define the anchor above the alias, in the same document",
            )
        return Alias(position, name, target)

    def _register(self, anchor: str | None, node: Scalar | Items | Fields) -> None:
        if anchor is not None:
            self._anchors[anchor] = node

    def _begin(self, event: yaml.SequenceStartEvent | yaml.MappingStartEvent) -> None:
        position = self._position(event)
        if event.tag not in _COLLECTION_TAGS[type(event)]:
            raise RefusedError(
                position,
                f"the tag {tag_shown(str(event.tag))} names a type that JSON does not have",
                "remove the tag",
                "NotSupported",
            )
        node: Items | Fields
        node = Items(position) if isinstance(event, yaml.SequenceStartEvent) else Fields(position)
        self._register(event.anchor, node)
        self._open.append((node, []))
        check_depth(len(self._open), position)

    def _end(self) -> None:
        node, children = self._open.pop()
        if isinstance(node, Items):
            node.items.extend(children)
        else:
            node.entries.extend(zip(children[::2], children[1::2], strict=True))
        self._add(node)

    def _add(self, node: Node) -> None:
        self._nodes += 1
        check_size(self._nodes, node.position)
        if self._open:
            self._open[-1][1].append(node)
        else:
            self._root = node


_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LITERAL = re.compile(r"true|false|null")
_JSON = JSONDecoder(strict=True)


class NotJSONError(ValueError):
    """The text is not a stream of JSON objects; it may still be YAML."""


def compose_json(text: str, first_line: int) -> list[Node]:
    """Return the trees of the JSON objects in `text`, one after the other as in `{}{}`.

    Raises NotJSONError where the text is not JSON, and RefusedError for too deep nesting, too many nodes and halves of
    surrogate pairs, which are no characters.
    """
    return _JSONReader(text, first_line).read_all()


class _JSONReader:
    """A recursive-descent reader; the recursion ends at MAX_DEPTH."""

    def __init__(self, text: str, first_line: int) -> None:
        self._text = text
        self._at = 0
        self._line = first_line
        self._line_start = 0
        self._nodes = 0

    def read_all(self) -> list[Node]:
        nodes: list[Node] = []
        while not self._at_end():
            if self._text[self._at] != "{":
                raise NotJSONError
            nodes.append(self._value(1))
        return nodes

    def _at_end(self) -> bool:
        self._skip_space()
        return self._at == len(self._text)

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        breaks = match.group().count("\n")
        if breaks:
            self._line += breaks
            self._line_start = self._at + match.group().rindex("\n") + 1
        self._at = match.end()

    def _position(self) -> Position:
        return Position(self._line, self._at - self._line_start + 1)

    def _take(self, character: str) -> bool:
        self._skip_space()
        if not self._text.startswith(character, self._at):
            return False
        self._at += 1
        return True

    def _expect(self, character: str) -> None:
        if not self._take(character):
            raise NotJSONError

    def _value(self, depth: int) -> Node:
        self._skip_space()
        position = self._position()
        self._nodes += 1
        check_size(self._nodes, position)
        if self._text.startswith('"', self._at):
            return self._string()
        if self._take("{"):
            return self._object(position, depth)
        if self._take("["):
            return self._array(position, depth)
        match = _NUMBER.match(self._text, self._at) or _LITERAL.match(self._text, self._at)
        if match is None:
            raise NotJSONError
        self._at = match.end()
        # YAML would read a number that overflows as text; JSON has no such fallback.
        if match.group()[-1].isdigit() and math.isinf(float(match.group())):
            raise RefusedError(
                position, "a number must fit a 64-bit float", "write a smaller number, or quote it as text"
            )
        return Scalar(position, match.group(), None, plain=True)

    def _string(self) -> Scalar:
        self._skip_space()
        position = self._position()
        if not self._text.startswith('"', self._at):
            raise NotJSONError
        try:
            value, self._at = _JSON.raw_decode(self._text, self._at)
        except JSONDecodeError as error:
            raise NotJSONError from error
        _check_surrogates(value, position)
        return Scalar(position, value, None, plain=False)

    def _object(self, position: Position, depth: int) -> Fields:
        check_depth(depth, position)
        node = Fields(position)
        if self._take("}"):
            return node
        while True:
            self._nodes += 1
            key = self._string()
            self._expect(":")
            node.entries.append((key, self._value(depth + 1)))
            if self._take("}"):
                return node
            self._expect(",")

    def _array(self, position: Position, depth: int) -> Items:
        check_depth(depth, position)
        node = Items(position)
        if self._take("]"):
            return node
        while True:
            node.items.append(self._value(depth + 1))
            if self._take("]"):
                return node
            self._expect(",")
