"""The reader of job files compared with kubectl's, and its refusals.

The values of SCALARS, KEYS and DOCUMENTS were measured: a Go program put each text through kubectl's parsers
(NewYAMLOrJSONDecoder of k8s.io/apimachinery v0.37.2, sigs.k8s.io/yaml v1.6.0, go.yaml.in/yaml/v2 v2.4.4, then
sigs.k8s.io/json with integers preserved) and wrote the JSON that the API server would store.
"""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from each_case import each_case
from finetune_operator.documents import (
    MAX_BYTES,
    MAX_DOCUMENTS,
    Document,
    JsonValue,
    Position,
    position_of,
    read_documents,
)
from finetune_operator.documents.nodes import MAX_DEPTH, MAX_NODES
from finetune_operator.spec.problems import Problem, describe_value, format_path
from suite_plugins.fuzz import examples

SCALARS: dict[str, JsonValue] = {
    "2e-5": 2e-05,
    "2.0e-5": 2e-05,
    "1e3": 1000,
    "1E+3": 1000,
    "1e-3": 0.001,
    ".5": 0.5,
    "5.": 5,
    "0x10": 16,
    "0X1F": 31,
    "-0x10": -16,
    "+0x10": 16,
    "0x": "0x",
    "0o17": 15,
    "0O17": 15,
    "0o8": "0o8",
    "017": 15,
    "00": 0,
    "08": 8,
    "09.5": 9.5,
    "0b11": 3,
    "0B11": 3,
    "-0b11": -3,
    "0b12": "0b12",
    "1_000": 1000,
    "1__0": 10,
    "_1": "_1",
    "1_0.5": 10.5,
    ".5_0": 0.5,
    ".5__0": ".5__0",
    "+1": 1,
    "-1": -1,
    "-0": 0,
    "-0.0": 0,
    "0.0": 0,
    "1.0": 1,
    "+.5": 0.5,
    "-.5": -0.5,
    "+": "+",
    ".": ".",
    "...": "...",
    ".e3": ".e3",
    "1e": "1e",
    "1,000": "1,000",
    "inf": "inf",
    "nan": "nan",
    "NaN": "NaN",
    "+.nan": "+.nan",
    "~": None,
    "null": None,
    "Null": None,
    "NULL": None,
    "nUll": "nUll",
    "yes": True,
    "Yes": True,
    "YES": True,
    "yEs": "yEs",
    "no": False,
    "No": False,
    "NO": False,
    "on": True,
    "On": True,
    "ON": True,
    "oN": "oN",
    "off": False,
    "Off": False,
    "OFF": False,
    "y": True,
    "Y": True,
    "n": False,
    "N": False,
    "true": True,
    "True": True,
    "TRUE": True,
    "tRUE": "tRUE",
    "false": False,
    "False": False,
    "FALSE": False,
    "2024-01-01": "2024-01-01",
    "2024-01-01T10:00:00Z": "2024-01-01T10:00:00Z",
    "1:30": "1:30",
    "190:20:30": "190:20:30",
    "9223372036854775807": 9223372036854775807,
    "9223372036854775808": 9.223372036854776e18,
    "-9223372036854775808": -9223372036854775808,
    "-9223372036854775809": -9.223372036854776e18,
    "18446744073709551615": 1.8446744073709552e19,
    "18446744073709551616": 1.8446744073709552e19,
    "+9223372036854775808": 9.223372036854776e18,
    "0xFFFFFFFFFFFFFFFF": 1.8446744073709552e19,
    "0x1FFFFFFFFFFFFFFFF": "0x1FFFFFFFFFFFFFFFF",
    "123456789012345678901234567890": 1.2345678901234568e29,
    "9007199254740993": 9007199254740993,
    "9007199254740993.0": 9007199254740992,
    "1.2345678901234567e18": 1234567890123456800,
    "1e18": 1000000000000000000,
    "1e19": 1e19,
    "1e20": 1e20,
    "1e21": 1e21,
    "1e400": "1e400",
    "1e-400": 0,
    "-1e400": "-1e400",
    "100Gi": "100Gi",
    "1k": "1k",
    "1.2.3": "1.2.3",
    "0.1.0": "0.1.0",
    "1.13.0": "1.13.0",
    "0x1p4": "0x1p4",
    "٣": "٣",
    "5%": "5%",
    "<<": "<<",
    "=": "=",
    "'5'": "5",
    '"5"': "5",
    "'yes'": "yes",
    '""': "",
    "''": "",
    '"~"': "~",
    "'1.10'": "1.10",
    '"2e-5"': "2e-5",
    "!!str 5": "5",
    "!!str ~": "~",
    "!!int 5": 5,
    "!!int '5'": 5,
    "!!int 0x10": 16,
    "!!float 5": 5,
    "!!float '1e3'": 1000,
    "!!float .5": 0.5,
    "!!bool yes": True,
    "!!null ''": None,
    "! 5": "5",
}

KEYS = {
    "1": "1",
    "0x10": "16",
    "017": "15",
    "-1": "-1",
    "+1": "1",
    "1_000": "1000",
    "true": "true",
    "yes": "true",
    "on": "true",
    "y": "true",
    "n": "false",
    "False": "false",
    "1.5": "1.5",
    "1.0": "1",
    "1e3": "1000",
    "1e5": "100000",
    "1e6": "1e+06",
    "0.1": "0.1",
    "0.0001": "0.0001",
    "1e-5": "1e-05",
    "3.14159265358979": "3.1415927",
    "123456789.5": "1.2345679e+08",
    "16777217.0": "1.6777216e+07",
    "1e21": "1e+21",
    "1e40": ".inf",
    "-1e40": "-.inf",
    "1e-50": "0",
    ".inf": ".inf",
    ".nan": ".nan",
    "-0.0": "-0",
    "2024-01-01": "2024-01-01",
    "''": "",
    "'1'": "1",
    '"yes"': "yes",
    "a.b": "a.b",
    "1.2.3": "1.2.3",
    "=": "=",
}

DOCUMENTS: dict[str, tuple[str, list[JsonValue]]] = {
    "a separator line parts two documents": ("a: 1\n---\nb: 2\n", [{"a": 1}, {"b": 2}]),
    "a separator may be followed by spaces and a comment": ("a: 1\n--- # next\nb: 2\n", [{"a": 1}, {"b": 2}]),
    "empty, comment-only and null documents are passed over": (
        "---\n# nothing\n---\n~\n---\nnull\n---\na: 1\n---\n",
        [{"a": 1}],
    ),
    "an empty file holds no document": ("", []),
    "an end mark closes a document": ("a: 1\n...\n---\nb: 2\n", [{"a": 1}, {"b": 2}]),
    "a byte order mark is no content": ("\ufeffa: 1\n", [{"a": 1}]),
    "CRLF line ends read as LF, in block text too": (
        "a: 1\r\nb: |\r\n  x\r\n  y\r\n---\r\nc: 2\r\n",
        [{"a": 1, "b": "x\ny\n"}, {"c": 2}],
    ),
    "literal text keeps its line breaks": ("a: |\n  x\n    y\n\n  z\n", [{"a": "x\n  y\n\nz\n"}]),
    "literal text at the end of a file ends with a line break even where the file does not": (
        "a: |\n  x",
        [{"a": "x\n"}],
    ),
    "clip keeps one line break": ("a: |\n  x\n\n\nb: 1\n", [{"a": "x\n", "b": 1}]),
    "strip keeps none": ("a: |-\n  x\n\n\nb: 1\n", [{"a": "x", "b": 1}]),
    "keep keeps all": ("a: |+\n  x\n\n\nb: 1\n", [{"a": "x\n\n\n", "b": 1}]),
    "folded text joins lines": ("a: >\n  x\n  y\n\n  z\n", [{"a": "x y\nz\n"}]),
    "folded text keeps lines that are indented further": ("a: >-\n  x\n   y\n  z\n", [{"a": "x\n y\nz"}]),
    "an indentation indicator keeps leading spaces": ("a: |2\n    x\n   y\n", [{"a": "  x\n y\n"}]),
    "template and shell characters in block text are text": (
        'a: |\n  {{ x }} $(Y) "z" # no comment\n',
        [{"a": '{{ x }} $(Y) "z" # no comment\n'}],
    ),
    "plain text folds over lines": ("a: x\n  y\n\n  z\n", [{"a": "x y\nz"}]),
    "double quotes know escapes": (
        'a: "\\u00e9\\U0001F600\\x41\\t\\n\\\\\\"\\x1b\\0"\n',
        [{"a": 'é😀A\t\n\\"\x1b\x00'}],
    ),
    "single quotes know none but the doubled quote": ("a: 'it''s \\n'\n", [{"a": "it's \\n"}]),
    "quoted text folds over lines": ('a: "x\n\n  y\\\n  z"\n', [{"a": "x\nyz"}]),
    "a tab after the colon is a space": ("a:\tb\t# c\n", [{"a": "b"}]),
    "tabs may indent flow collections": ("a: [\n\t1,\n\t2\n]\n", [{"a": [1, 2]}]),
    "a colon inside a word is text": ("a: http://x/y:z\nb: [http://x]\n", [{"a": "http://x/y:z", "b": ["http://x"]}]),
    "a hash inside a word is text": ("a: x#c\n", [{"a": "x#c"}]),
    "an alias repeats its anchor's value": ("a: &x {b: [1]}\nc: *x\n", [{"a": {"b": [1]}, "c": {"b": [1]}}]),
    "an alias refers to the last anchor of its name": ("a: &x 1\nb: &x 2\nc: *x\n", [{"a": 1, "b": 2, "c": 2}]),
    "an alias may stand as a key": ("a: &x name\n*x : 2\n", [{"a": "name", "name": 2}]),
    "a merge fills in what is not set after it": (
        "b: &b {x: 1, w: 2}\na: {<<: *b, x: 3}\n",
        [{"a": {"w": 2, "x": 3}, "b": {"w": 2, "x": 1}}],
    ),
    "a merge replaces what is set before it": (
        "b: &b {x: 1, w: 2}\na: {x: 3, <<: *b}\n",
        [{"a": {"w": 2, "x": 1}, "b": {"w": 2, "x": 1}}],
    ),
    "the earlier of several merged objects wins": (
        "b: &b {x: 1}\nc: &c {x: 2, w: 3}\na: {<<: [*b, *c]}\n",
        [{"a": {"w": 3, "x": 1}, "b": {"x": 1}, "c": {"w": 3, "x": 2}}],
    ),
    "a merged object may itself merge": (
        "b: &b {x: 1}\nc: &c {<<: *b, w: 2}\na: {<<: *c}\n",
        [{"a": {"w": 2, "x": 1}, "b": {"x": 1}, "c": {"w": 2, "x": 1}}],
    ),
    "an object may merge twice": ("b: &b {x: 1}\na: {<<: *b, <<: {w: 2}}\n", [{"a": {"w": 2, "x": 1}, "b": {"x": 1}}]),
    "a quoted merge key is an ordinary field": ('a: {"<<": {x: 1}}\n', [{"a": {"<<": {"x": 1}}}]),
    "lists of lists, and lists level with their field": (
        "a:\n- - 1\n  - 2\n- x\nb: 1\n",
        [{"a": [[1, 2], "x"], "b": 1}],
    ),
    "flow collections may leave values out": (
        "a: {b, c: 1}\nd: [x: 1, w]\n",
        [{"a": {"b": None, "c": 1}, "d": [{"x": 1}, "w"]}],
    ),
    "explicit keys and values": ("? a\n: b\n? |\n  block\n: c\n", [{"a": "b", "block\n": "c"}]),
    "a document need not be an object": ("[1, two]\n---\ntext\n", [[1, "two"], "text"]),
    "JSON reads as JSON": (
        '{\n\t"a": [1.0, -0.0, 1e3, 1e-7, "\\ud83d\\ude00\\/", true, null, {}, []],\n\t"on": "on"\n}\n',
        [{"a": [1, 0, 1000, 1e-07, "😀/", True, None, {}, []], "on": "on"}],
    ),
    "JSON keeps line separators and control characters that YAML folds or refuses": (
        '{"a": "x\u2028 y\x7f"}',
        [{"a": "x\u2028 y\x7f"}],
    ),
    "JSON has no merge key": ('{"a": {"<<": {"x": 1}}}', [{"a": {"<<": {"x": 1}}}]),
    "JSON objects may follow one another without a separator": (
        '{"a": 1}{"b": 2}\n{"c": 3}',
        [{"a": 1}, {"b": 2}, {"c": 3}],
    ),
    "JSON beyond 64 bits is a float": ('{"a": 123456789012345678901234567890}', [{"a": 1.2345678901234568e29}]),
    "JSON and YAML may share a file": ('{"a": 1}\n---\nb: 2\n', [{"a": 1}, {"b": 2}]),
    "what begins like JSON but is not may be YAML": ('{a: 1, "b": NaN, "c": 010, }\n', [{"a": 1, "b": "NaN", "c": 8}]),
}


def strictly(value: JsonValue) -> object:
    """Return a form in which 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return {key: strictly(item) for key, item in value.items()}
    if isinstance(value, list):
        return [strictly(item) for item in value]
    return type(value), value


def values_of(source: str | bytes) -> list[JsonValue]:
    documents, problems = read_documents(source)
    assert problems == []
    return [document.value for document in documents]


def refusals_of(source: str | bytes) -> list[Problem]:
    problems = read_documents(source)[1]
    assert all(problem.rule and problem.hint for problem in problems)
    return problems


@each_case("text", SCALARS)
def test_a_scalar_has_the_value_that_kubectl_gives_it(text: str) -> None:
    expected = strictly([{"a": SCALARS[text]}])
    assert strictly(values_of(f"a: {text}\n")) == expected
    if "," not in text:
        assert strictly(values_of(f"{{a: {text}}}\n")) == expected


@pytest.mark.parametrize("text", KEYS)
def test_a_key_has_the_name_that_kubectl_gives_it(text: str) -> None:
    assert values_of(f"{text}: x\n") == [{KEYS[text]: "x"}]


@each_case("sentence", DOCUMENTS)
def test_documents_have_the_values_that_kubectl_gives_them(sentence: str) -> None:
    text, expected = DOCUMENTS[sentence]
    assert strictly(values_of(text)) == strictly(expected)


# Refusals: the text, then line, column, path, reason and a part of the rule. kubectl accepts some of these and silently
# drops or changes something; the rows say so.
REFUSED: dict[str, tuple[str, int, int, str, str, str]] = {
    "a field that is set twice (kubectl takes the last)": (
        "a: 1\nb: 2\na: 3\n",
        3,
        1,
        "a",
        "Duplicate",
        "already set on line 1",
    ),
    "a field set twice under names that become equal": (
        'x:\n  1: a\n  "1": b\n',
        3,
        3,
        'x["1"]',
        "Duplicate",
        "already set on line 2",
    ),
    "a JSON field that is set twice (kubectl takes the last)": (
        '{"a": 1,\n "a": 2}',
        2,
        2,
        "a",
        "Duplicate",
        "on line 1",
    ),
    "infinity": ("spec:\n  rate: .inf\n", 2, 9, "spec.rate", "Invalid", "no infinity and no NaN"),
    "not a number": ("a: [1, .nan]\n", 1, 8, "a[1]", "Invalid", "no infinity and no NaN"),
    "a custom tag (kubectl reads the text)": ("a: 1\nb: !secret x\n", 2, 4, "b", "Invalid", "the tag !secret"),
    "a tag of a language": ("a: !!python/name:os.system x\n", 1, 4, "a", "Invalid", "the tag !!python/name:os.system"),
    "a tag for bytes (kubectl decodes them)": ("a: !!binary YQ==\n", 1, 4, "a", "Invalid", "the tag !!binary"),
    "a tag that does not fit": ("a: !!int five\n", 1, 4, "a", "Invalid", "!!int does not fit"),
    "a number tag on a boolean": ("a: !!int yes\n", 1, 4, "a", "Invalid", "!!int does not fit"),
    "a tag on an object (kubectl overlooks it)": ("a: !!set {x, y}\n", 1, 4, "", "NotSupported", "the tag !!set"),
    "a field name that is null": ("a:\n  ~: 1\n", 2, 3, "a", "Invalid", "a field name must be text"),
    "a field name that is a list": ("? [1]\n: a\n", 1, 3, "", "Invalid", "a field name must be text"),
    "a field name beyond 64 bits": ("18446744073709551615: a\n", 1, 1, "", "Invalid", "a field name must be text"),
    "an alias without an anchor": ("a: 1\nb: *x\n", 2, 4, "", "Syntax", "no anchor &x before it"),
    "an alias to another document's anchor": ("a: &x 1\n---\nb: *x\n", 3, 4, "", "Syntax", "no anchor &x before it"),
    "an alias inside its own anchor": ("a: &x\n  - 1\n  - *x\n", 3, 5, "", "Invalid", "must not contain the alias *x"),
    "a merge of itself": ("a: &x\n  <<: *x\n", 2, 7, "", "Invalid", "must not contain the alias *x"),
    "a merge of text": ("a:\n  <<: text\n", 2, 7, "a", "Invalid", "<< merges an object"),
    "a merge of an alias to a list": ("l: &l [{x: 1}]\na: {<<: *l}\n", 2, 9, "a", "Invalid", "<< merges an object"),
    "a tab as indentation": ("a:\n\tb: 1\n", 2, 1, "", "Syntax", "cannot start any token"),
    "a colon in plain text": ("a: 1\nb: c: d\n", 2, 5, "", "Syntax", "mapping values are not allowed"),
    "a field out of line": ("a:\n  b: 1\n c: 2\n", 3, 2, "", "Syntax", "did not find expected key"),
    "an open bracket": ("a: [1, 2\nb: 3\n", 2, 2, "", "Syntax", "it begins on line 1"),
    "an open quote": ('a: 1\nb: "x\nc: 1\n', 4, 1, "", "Syntax", "it begins on line 2"),
    "an unknown escape": ('a: "\\q"\n', 1, 5, "", "Syntax", "unknown escape character"),
    "half of a surrogate pair in JSON (kubectl replaces it)": (
        '{"a":\n "\\ud800"}',
        2,
        2,
        "",
        "Syntax",
        "surrogate pair",
    ),
    "a surrogate pair in YAML": ('a: "\\ud83d\\ude00"\n', 1, 7, "", "Syntax", "invalid Unicode character escape"),
    "a reserved character": ("a: @x\n", 1, 4, "", "Syntax", "cannot start any token"),
    "a control character": ("a: 1\nb: x\x07\n", 2, 5, "", "Syntax", "control character U+0007"),
    "a JSON number that overflows": ('{"a": 1e400}', 1, 7, "", "Syntax", "must fit a 64-bit float"),
    "content after an end mark (kubectl drops it)": ("a: 1\n...\nb: 2\n", 3, 1, "", "Syntax", "<document start>"),
    "content beside a separator": ("a: 1\n--- {b: 2}\n", 2, 4, "", "Syntax", "begins with `---`"),
    "a separator after another line break than a line feed (kubectl drops the rest)": (
        "a: 1\r---\rb: 2\r",
        2,
        1,
        "",
        "Syntax",
        "after a line feed only",
    ),
    "a directive": ("%YAML 1.1\n---\na: 1\n", 2, 1, "", "Syntax", "<document start>"),
    "JSON with a comma missing": ('{\n  "a": 1\n  "b": 2\n}\n', 3, 6, "", "Syntax", "expected ',' or '}'"),
    "too deep lists": ("b: 1\na: " + "[" * 100 + "]" * 100, 2, 103, "", "NotSupported", "at most 100 levels"),
    "absurdly deep lists": ("[" * 1_000_000, 1, 101, "", "NotSupported", "at most 100 levels"),
    "absurdly deep JSON": ('{"a":' * 500_000, 1, 501, "", "NotSupported", "at most 100 levels"),
    "absurdly deep block lists": ("- " * 100_000, 1, 201, "", "NotSupported", "at most 100 levels"),
}


@each_case("sentence", REFUSED)
def test_ambiguous_yaml_is_refused_with_its_position(sentence: str) -> None:
    text, line, column, path, reason, rule_part = REFUSED[sentence]
    (problem,) = refusals_of(text)
    assert (problem.line, problem.column, problem.path, problem.reason) == (line, column, path, reason)
    assert rule_part in problem.rule


def test_nesting_up_to_the_limit_is_read() -> None:
    (value,) = values_of("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    depth = 0
    while isinstance(value, list):
        depth, value = depth + 1, value[0] if value else None
    assert depth == MAX_DEPTH


def test_depth_counts_repeated_aliases_and_chained_merges() -> None:
    halves = f"a: &a {'[' * 60}{']' * 60}\nb: {'[' * 60}*a{']' * 60}\n"
    merges = "m0: &m0 {x: 1}\n" + "".join(f"m{i}: &m{i} {{<<: *m{i - 1}}}\n" for i in range(1, 3000))
    assert [(p.line, p.rule) for p in refusals_of(halves)] == [(2, "a document must nest at most 100 levels deep")]
    assert [(p.line, p.rule) for p in refusals_of(merges)] == [(100, "a document must nest at most 100 levels deep")]


def billion_laughs(levels: int) -> str:
    lines = ["l0: &l0 [" + ", ".join(["lol"] * 10) + "]"]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines) + "\n"


def test_exploding_aliases_are_refused_at_the_line_that_exceeds_the_limit() -> None:
    # Expanded, level 9 would hold 10**10 strings: only a bounded count can end this test. Level i holds 10 ** (i + 1)
    # strings, so go-yaml's share of aliases, 99 % of the steps, is passed early. A list beside them keeps the share
    # down; then the count ends the work, at level 4's 100,000 strings on line 6.
    (by_share,) = refusals_of(billion_laughs(10))
    (by_count,) = refusals_of("pad: [" + "1, " * 2000 + "]\n" + billion_laughs(10))
    assert (by_share.line, by_share.rule) == (4, "aliases must not make up nearly all of a document")
    assert (by_count.line, by_count.hint) == (6, "use fewer aliases, or split the file")


def test_aliases_that_do_not_explode_are_written_out() -> None:
    (value,) = values_of(billion_laughs(2))
    assert value == {"l0": ["lol"] * 10, "l1": [["lol"] * 10] * 10}


def test_more_values_than_the_limit_are_refused_while_they_are_read() -> None:
    fits = "- 1\n" * (MAX_NODES - 1)
    assert values_of(fits) == [[1] * (MAX_NODES - 1)]
    (problem,) = refusals_of(fits + "- 1\n" * 10)
    assert (problem.line, problem.reason) == (MAX_NODES + 1, "NotSupported")


def test_more_documents_than_the_limit_are_refused() -> None:
    assert len(values_of("a: 1\n---\n" * MAX_DOCUMENTS)) == MAX_DOCUMENTS
    (problem,) = refusals_of("a: 1\n---\n" * (MAX_DOCUMENTS + 1))
    assert (problem.line, problem.reason) == (2 * MAX_DOCUMENTS + 1, "NotSupported")


def test_a_stream_of_json_objects_counts_as_one_text() -> None:
    (problem,) = refusals_of("{}" * (MAX_NODES + 1))
    assert (problem.line, problem.column, problem.reason) == (1, 2 * MAX_NODES + 1, "NotSupported")


def test_a_file_beyond_the_request_limit_is_refused_unread() -> None:
    text = "# " + "é" * (MAX_BYTES // 2)
    (problem,) = refusals_of(text)
    assert (problem.line, problem.reason) == (1, "NotSupported")
    assert str(MAX_BYTES) in problem.rule
    assert refusals_of(text.encode())[0] == problem
    assert values_of("# " + "e" * (MAX_BYTES - 2)) == []


def test_bytes_are_read_by_their_byte_order_mark() -> None:
    for encoded in (
        "é: 1\n".encode(),
        "\ufeffé: 1\n".encode(),
        "\ufeffé: 1\n".encode("utf-16-le"),
        "é: 1".encode("utf-16"),
    ):
        assert values_of(encoded) == [{"é": 1}]


def test_bytes_of_another_encoding_are_refused_with_their_place() -> None:
    (problem,) = refusals_of("a: 1\nname: café\n".encode("latin-1"))
    assert (problem.line, problem.column, problem.rule) == (2, 10, "the file must be UTF-8 text")


def test_all_problems_of_a_file_are_reported_and_valid_documents_are_read() -> None:
    text = "a: .inf\nb: 1\nb: 2\n---\nx: ]\n---\nc: 3\n---\nd: @\n"
    documents, problems = read_documents(text)
    assert [(problem.line, problem.reason) for problem in problems] == [
        (1, "Invalid"),
        (3, "Duplicate"),
        (5, "Syntax"),
        (9, "Syntax"),
    ]
    assert [(document.index, document.line, document.value) for document in documents] == [
        (0, 1, {"a": ".inf", "b": 2}),
        (1, 7, {"c": 3}),
    ]


def test_a_refused_value_is_shown_but_a_credential_is_not() -> None:
    problems = refusals_of(f"plain: !x text\nhubToken: !x whatever\nother: !x hf_{'A1' * 17}\nhubToken: again\n")
    assert [problem.value for problem in problems] == ['"text"', "(hidden)", '"(hidden)"', None]


def test_positions_name_fields_and_list_items() -> None:
    text = '# job\nspec:\n  a: 1\n  list:\n    - x\n    - b:\n        2\n---\n{"j": {\n  "k": [1, 2]}}\n'
    first, second = read_documents(text)[0]
    assert first == Document(
        index=0,
        line=2,
        value={"spec": {"a": 1, "list": ["x", {"b": 2}]}},
        positions={
            (): Position(2, 1),
            ("spec",): Position(2, 1),
            ("spec", "a"): Position(3, 3),
            ("spec", "list"): Position(4, 3),
            ("spec", "list", 0): Position(5, 7),
            ("spec", "list", 1): Position(6, 7),
            ("spec", "list", 1, "b"): Position(6, 7),
        },
    )
    assert second.positions == {
        (): Position(9, 1),
        ("j",): Position(9, 2),
        ("j", "k"): Position(10, 3),
        ("j", "k", 0): Position(10, 9),
        ("j", "k", 1): Position(10, 12),
    }


def test_positions_of_merged_and_aliased_fields() -> None:
    text = "base: &base\n  x: 1\na:\n  <<: *base\n  y: 2\nb: *base\n"
    (document,) = read_documents(text)[0]
    assert document.positions["a", "x"] == Position(2, 3)
    assert document.positions["b",] == Position(6, 1)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("spec", "training", "epochs"), Position(3, 5)),
        (("spec", "training", "missing", 0, "deeper"), Position(2, 3)),
        (("spec", "missing"), Position(1, 1)),
        (("missing",), Position(1, 1)),
        ((), Position(1, 1)),
    ],
)
def test_a_missing_field_has_the_position_of_its_nearest_ancestor(
    path: tuple[str | int, ...], expected: Position
) -> None:
    (document,) = read_documents("spec:\n  training:\n    epochs: 3\n")[0]
    assert position_of(document, path) == expected


def test_a_list_stands_for_its_items() -> None:
    text = (
        "kind: List\napiVersion: v1\nitems:\n- kind: A\n  x: 1\n- kind: BList\n  apiVersion: g/v1\n"
        "  items:\n  - z: 2\n---\nkind: C\nitems: none\n---\nkind: List\nitems: []\n"
    )
    documents, problems = read_documents(text)
    assert problems == []
    assert [(document.index, document.line, document.value) for document in documents] == [
        (0, 4, {"kind": "A", "x": 1}),
        (1, 9, {"z": 2, "kind": "B", "apiVersion": "g/v1"}),
        (2, 11, {"kind": "C", "items": "none"}),
    ]
    assert position_of(documents[0], ("x",)) == Position(5, 3)
    assert position_of(documents[1], ("z",)) == Position(9, 5)
    assert position_of(documents[1], ("kind",)) == Position(9, 5)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ((), ""),
        (("spec", "training", "learningRate"), "spec.training.learningRate"),
        (("spec", "dataset", "columns", "my col"), 'spec.dataset.columns["my col"]'),
        (("items", 3, "a.b/c"), 'items[3]["a.b/c"]'),
        (("1",), '["1"]'),
        (("é\n",), '["é\\n"]'),
    ],
)
def test_a_path_is_written_so_that_it_reads_back(path: tuple[str | int, ...], expected: str) -> None:
    assert format_path(path) == expected


@pytest.mark.parametrize(
    ("value", "path", "expected"),
    [
        ("text", (), '"text"'),
        ("x" * 100, (), '"' + "x" * 57 + '..."'),
        (True, (), "true"),
        (None, (), "null"),
        (2e-5, (), "2e-05"),
        ({"a": 1}, (), "an object with 1 field"),
        ([1, 2], (), "a list of 2 items"),
        ("abc", ("spec", "hubToken"), "(hidden)"),
        ("abc", ("env", 0, "AWS_SECRET_ACCESS_KEY"), "(hidden)"),
        ("tokens", ("columns", "tokens"), '"tokens"'),
        (f"Bearer hf_{'a' * 34}", ("env", 0, "value"), '"Bearer (hidden)"'),
        ("https://me:pass@host/x", (), '"https://(hidden)@host/x"'),
    ],
)
def test_a_value_is_shown_short_and_never_as_a_credential(
    value: object, path: tuple[str | int, ...], expected: str
) -> None:
    assert describe_value(value, path) == expected


def stored(value: JsonValue) -> JsonValue:
    """Return the value as the API server stores it: whole floats, here up to 2**53, as integers."""
    if isinstance(value, dict):
        return {key: stored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [stored(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    return value


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
# Beyond 2**53 the shortest decimal and the exact integer differ; SCALARS has those cases.
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(-(2.0**53), 2.0**53)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(TEXT, JSON_VALUES, max_size=4)


@examples(40, everything=100)
@given(OBJECTS, st.booleans(), st.sampled_from([None, 1, 4]))
def test_written_json_reads_back(value: dict[str, JsonValue], ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert strictly(values_of(text)[0]) == strictly(stored(value))


@examples(40, everything=100)
@given(st.lists(OBJECTS.filter(bool), min_size=1, max_size=3), st.booleans())
def test_written_yaml_reads_back(values: list[dict[str, JsonValue]], flow: bool) -> None:
    # Quoted text throughout: PyYAML leaves plain some text, such as 2e-5 and y, that kubectl reads as another type.
    # Documents are dumped apart, as PyYAML may write `--- x` on one line, which kubectl refuses.
    text = "---\n".join(
        yaml.dump(value, Dumper=QuotingDumper, default_flow_style=flow, allow_unicode=True) for value in values
    )
    assert strictly(values_of(text)) == strictly([stored(value) for value in values])


class QuotingDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


QuotingDumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


@examples(100, everything=300)
@given(st.text("ab:-[]{},&*!|>'\"%@`#?<~ \t\n\r.0\\", max_size=40))
def test_any_text_is_read_or_refused_with_a_line_within_it(text: str) -> None:
    for problem in refusals_of(text):
        assert problem.line is not None
        assert 1 <= problem.line <= text.count("\n") + text.count("\r") + 2


REPAIRS = (
    ("a:\n\tb: 1\n", "indent with spaces: line 2 begins with a tab", {"a": {"b": 1}}),
    ("a:\n\tb: 1\n\tc: 2\n", "indent with spaces: line 2, line 3 begin with a tab", {"a": {"b": 1, "c": 2}}),
    (
        "a:\n  b:\n\t\tc: 1\n    d: 2\ne: 3\n",
        "indent with spaces: line 3 begins with a tab",
        {"a": {"b": {"c": 1, "d": 2}}, "e": 3},
    ),
    ("a:1\nb: 2\n", "put a space after the colon in line 1: a: 1", {"a": 1, "b": 2}),
    ("a: 1\nb:c@d\ne: 2\n", "put a space after the colon in line 2: b: c@d", {"a": 1, "b": "c@d", "e": 2}),
    ("a: {b: 1, c: [2\nd: 3\n", "close what line 1 opens, with ]}", {"a": {"b": 1, "c": [2]}, "d": 3}),
    ('a: "one\nb: 2\n', 'close the quote in line 1, with "', {"a": "one", "b": 2}),
)
"""Text with a syntax error, the hint, and the value that the hint gives."""


@pytest.mark.parametrize(("text", "hint", "value"), REPAIRS)
def test_syntax_error_names_its_repair_and_the_rest_is_read(text: str, hint: str, value: object) -> None:
    documents, (problem,) = read_documents(text)
    assert (problem.reason, problem.hint) == ("Syntax", hint)
    assert [document.value for document in documents] == [value]


def test_several_syntax_errors_are_reported_in_one_pass() -> None:
    documents, problems = read_documents('a:1\nb:\n  c: "1\ne: 3\n')
    assert [problem.hint for problem in problems] == [
        "put a space after the colon in line 1: a: 1",
        'close the quote in line 3, with "',
    ]
    assert [document.value for document in documents] == [{"a": 1, "b": {"c": "1"}, "e": 3}]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("a:\n  b: 1\n   c: 2\n", "check the indentation, put a space after each colon"),
        ("a:\n  b: 1\n c:\n    d: 2\n", "check that fields of one object start in the same column"),
        ('a: "C:\\Users\\x.csv"\nb: 2\n', "put text that contains a backslash in single quotes"),
        ('a: "C:\\data\\x.csv"\nb: 2\n', "put text that contains a backslash in single quotes"),
        ("a: one: two\n", "put text that contains ': ' in quotes"),
        ("a: 1\nb 2\nc: 3\n", "write `name: value`, with a colon and a space"),
        ("name: @team/run\n", "put text that begins with this character in quotes"),
    ],
)
def test_syntax_error_that_is_not_repaired_has_its_line_and_a_hint(text: str, hint: str) -> None:
    documents, (problem,) = read_documents(text)
    assert problem.line is not None
    assert hint in problem.hint
    assert documents == []


@pytest.mark.parametrize("text", ["x: ]\n", "a: 1\n- b\n", "a: {{ .Values.a }}{\n"])
def test_syntax_error_with_several_meanings_leaves_its_document_out(text: str) -> None:
    documents, problems = read_documents(text)
    assert [problem.reason for problem in problems] == ["Syntax"]
    assert documents == []


def test_repeated_field_after_an_empty_one_gets_an_indentation_hint() -> None:
    _, (problem,) = read_documents("a:\nuri: 1\nb:\nuri: 2\n")
    assert problem.hint == "indent it if it belongs to b, the field above; else remove one of the two"
