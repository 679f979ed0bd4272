"""Reads the text of a job file as kubectl would, with the position of each field.

One file, one meaning: `finetune` and `kubectl apply` must send the same numbers and the same text. So the
rules are those of kubectl's reader (k8s.io/apimachinery's YAML-or-JSON decoder over sigs.k8s.io/yaml 1.6,
which wraps go-yaml v2): documents end at lines that begin with `---`, documents that are empty or null are
passed over, JSON is read as JSON, and a `List` stands for its items.

Refused, always with a line: files beyond 3 MiB or not in Unicode, syntax errors, control characters, duplicate
fields, infinities and NaN, tags of types that JSON lacks, aliases that loop or explode, nesting beyond 100
levels, more than 100,000 values or 10,000 documents, field names that cannot become text, and content that
kubectl would silently drop (after `...`).

Known differences, all of them refusals on one side: kubectl keeps the last of duplicate fields, and reads the
text of custom tags and the base64 of `!!binary`; go-yaml refuses the escape `\\/` and an unspaced `?` in a flow
list. Text that is JSON after `---` is read by JSON's rules here and by YAML's there, which lose or refuse
surrogate pairs, raw U+2028 and some tabs. Without libyaml, PyYAML's own scanner also refuses tabs before
values and comments. Pure: text in, values out, no file system and no printing.
"""

import codecs
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from finetune_operator.documents.nodes import Node, NotJSONError, Position, RefusedError, compose_json, compose_yaml
from finetune_operator.documents.value_reader import JsonValue, Path, ValueReader
from finetune_operator.spec.problems import Problem

__all__ = ["MAX_BYTES", "MAX_DOCUMENTS", "Document", "JsonValue", "Path", "Position", "position_of", "read_documents"]

MAX_BYTES = 3 * 1024 * 1024
"""Largest request that the API server takes; nothing larger could be applied."""

MAX_DOCUMENTS = 10_000
"""Documents between separators; starting the parser for each costs more than its text."""

_SEPARATOR = "---"
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_FORBIDDEN_CHARACTER = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Document:
    """One object of a file, after Lists are unfolded."""

    index: int
    """Its place among the objects of the file, from 0."""
    line: int
    """Line on which its value begins."""
    value: JsonValue
    positions: Mapping[Path, Position]
    """Start of each field's name, of each list item, and under `()` of the value itself. Merged fields point
    to where they are written, aliased ones to the field that holds the alias."""


def read_documents(source: str | bytes) -> tuple[list[Document], list[Problem]]:
    """Return every object in the text of a YAML or JSON file, and all problems of the file.

    Bytes are UTF-8, or UTF-16 with a byte order mark. A document that is not well-formed is returned as the hints would
    have it if these leave no choice, and else left out; the others are still read. A document with a refused value is
    returned with that value as its text (the last one of duplicates), so that its other fields can be checked in the
    same pass: while there are problems, the values must not be used for more.
    """
    documents: list[Document] = []
    problems: list[Problem] = []
    try:
        for first_line, chunk in _split(_decoded(source), problems):
            documents.extend(_read_chunk(first_line, chunk, problems))
    except RefusedError as refused:
        problems.append(refused.problem)
    return [replace(document, index=index) for index, document in enumerate(documents)], problems


def position_of(document: Document, path: Path) -> Position:
    """Return the position of the field, or of its nearest ancestor that exists: the place to add a missing field."""
    for length in range(len(path), 0, -1):
        if path[:length] in document.positions:
            return document.positions[path[:length]]
    return document.positions[()]


def _decoded(source: str | bytes) -> str:
    if isinstance(source, str):
        _check_bytes(len(source.encode("utf-8", "surrogatepass")))
        return source.removeprefix("\ufeff")
    _check_bytes(len(source))
    mark, encoding = next((pair for pair in _BYTE_ORDER_MARKS if source.startswith(pair[0])), (b"", "utf-8"))
    content = source[len(mark) :]
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        before = content[: error.start].decode(encoding)
        position = Position(before.count("\n") + 1, len(before) - before.rfind("\n"))
        raise RefusedError(position, f"the file must be {encoding.upper()} text", "save the file as UTF-8") from error


def _check_bytes(size: int) -> None:
    if size > MAX_BYTES:
        raise RefusedError(
            Position(1, 1),
            f"a file must have at most {MAX_BYTES} bytes, the limit of a request to the API server",
            "split the file",
            "NotSupported",
        )


def _split(text: str, problems: list[Problem]) -> Iterator[tuple[int, str]]:
    """Yield the chunks between separator lines that are not blank, each with the number of its first line.

    As for kubectl, a line that begins with `---` is a separator wherever it stands, and may carry a comment only.
    """
    chunk: list[str] = []
    first_line, chunks = 1, 0
    for number, ended in enumerate([*text.removesuffix("\n").split("\n"), _SEPARATOR], start=1):
        line = ended.removesuffix("\r")
        if not line.startswith(_SEPARATOR):
            chunk.append(line)
            continue
        rest = line.removeprefix(_SEPARATOR).strip()
        if rest and not rest.startswith("#"):
            rule = "a line that begins with `---` separates documents and may have only a comment after it"
            place = Position(number, len(_SEPARATOR) + 1)
            problems.append(RefusedError(place, rule, "move the rest to the next line").problem)
        if any(part.strip() for part in chunk):
            chunks += 1
            _check_documents(chunks, first_line)
            yield first_line, "\n".join([*chunk, ""])
        chunk, first_line = [], number + 1


def _check_documents(documents: int, line: int) -> None:
    if documents > MAX_DOCUMENTS:
        rule = f"a file must have at most {MAX_DOCUMENTS} documents"
        raise RefusedError(Position(line, 1), rule, "split the file", "NotSupported")


def _read_chunk(first_line: int, chunk: str, problems: list[Problem]) -> list[Document]:
    documents: list[Document] = []
    try:
        for node in _repairable(chunk, first_line, problems):
            reader = ValueReader()
            try:
                value = reader.read(node)
            finally:
                problems.extend(reader.problems)
            if value is not None:
                documents.extend(_unfolded(Document(0, node.position.line, value, reader.positions)))
    except RefusedError as refused:
        problems.append(refused.problem)
    return documents


def _repairable(chunk: str, first_line: int, problems: list[Problem]) -> list[Node]:
    """Return the nodes of a chunk; one with syntax errors is read as their hints would have it, and reported."""
    for _ in range(_MOST_REPAIRS):
        try:
            return _compose(chunk, first_line)
        except RefusedError as refused:
            if refused.repaired is None:
                raise
            problems.append(refused.problem)
            chunk = refused.repaired
    return []


_MOST_REPAIRS = 4
"""Syntax errors of one document that are repaired to find its other problems."""


def _compose(chunk: str, first_line: int) -> list[Node]:
    if chunk.lstrip().startswith("{"):
        try:
            return compose_json(chunk, first_line)
        except NotJSONError:
            pass  # a flow mapping, `{a: 1}`, is YAML
    forbidden = _FORBIDDEN_CHARACTER.search(chunk)
    if forbidden is not None:
        before = chunk[: forbidden.start()]
        raise RefusedError(
            Position(first_line + before.count("\n"), len(before) - before.rfind("\n")),
            f"YAML text must not contain the control character U+{ord(forbidden.group()):04X}",
            'write it as an escape in double quotes, such as "\\x1b"',
        )
    node = compose_yaml(chunk, first_line)
    return [] if node is None else [node]


def _unfolded(document: Document) -> list[Document]:
    """Return the items of a List, each as a document of its own, also of Lists in Lists; anything else as it is."""
    value = document.value
    if not isinstance(value, dict):
        return [document]
    kind, items = value.get("kind"), value.get("items")
    if not (isinstance(kind, str) and kind.endswith("List") and isinstance(items, list)):
        return [document]
    positions: list[dict[Path, Position]] = [{} for _ in items]
    for path, position in document.positions.items():
        match path:
            case ("items", int(item), *rest):
                positions[item][tuple(rest)] = position
    unfolded: list[Document] = []
    for item_value, item_positions in zip(items, positions, strict=True):
        # A typed list (FineTuneJobList) leaves kind and apiVersion out of its items.
        if isinstance(item_value, dict) and not item_value.get("kind") and not item_value.get("apiVersion"):
            item_kind = kind.removesuffix("List")
            item_value = {**item_value, "kind": item_kind, "apiVersion": value.get("apiVersion")}
        unfolded.extend(_unfolded(Document(0, item_positions[()].line, item_value, item_positions)))
    return unfolded
