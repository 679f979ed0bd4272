"""Problem in a user's document, as a value that any front end can show.

A problem names the field, the value, the rule and the hint, so that a message can be acted on without the
documentation. Problems are collected and reported together; nothing here raises. A value that looks like a credential
is never kept: a problem may end up in a terminal, a CI log or the status of an object that many people can read.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import JsonValue

from finetune_operator.spec.hint_values import Drop, Hint, Move, Rename, ReplaceBy, SetTo

PathPart = str | int
"""One step into a document: a field name, or a position in a list (from 0)."""

Reason = Literal[
    "Invalid",
    "Required",
    "Unknown",
    "Duplicate",
    "NotSupported",
    "NotYetSupported",
    "Syntax",
    "Immutable",
    "Forbidden",
]
"""Kind of problem, in the CamelCase of Kubernetes condition reasons."""

HIDDEN = "(hidden)"
MAX_DEPTH = 100
"""Maximum nesting of a document: several times a FineTuneJob's need, far below Python's recursion limit."""
MAX_VALUES = 10_000
"""Maximum number of fields and items in a document: ten times the need of the largest FineTuneJob."""
MAX_CHARACTERS = 131_072
"""Maximum characters of a document, except annotations, which Kubernetes bounds (at twice as many)."""
MOST_PROBLEMS = 100
"""Maximum problems reported for an object: nobody reads more, and it bounds the operator's work."""

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
# Names whose text is a credential. Plurals stay visible: `columns.tokens` and `maxTokens` are ordinary settings.
SECRET_NAME_END = (
    r"(?:password|passwd|passphrase|passcode|(?<=[a-z0-9][_-])pass|pwd|secret|token|private[_-]?key[_-]?id"
    r"|(?:api|access|account|private|secret)[_-]?key)"
)
"""End of a name whose text is a credential, for a pattern that ignores case."""
_SECRET_NAME = re.compile(rf"(?:{SECRET_NAME_END}|credentials?)$", re.IGNORECASE)
# Credentials of JWT, Hugging Face, git hosts, AWS, Slack, Google, OpenAI-style, Stripe, Databricks and npm, and keys in
# base64 (PEM that is no certificate) are recognisable anywhere. A search for the first begins where a word begins, and
# looks first for the dot behind it: each letter is read a few times, not once for each `eyJ` before it.
SECRET_TEXT = re.compile(
    r"(?<![\w-])(?=[\w-]++\.[\w.-])[\w-]*?\beyJ[\w-]{8,}+\.[\w.-]+"
    r"|\b(?:hf|api_org)_[A-Za-z0-9]{8,}|\bgh[pousr]_[A-Za-z0-9]{8,}|\bgithub_pat_\w{8,}|\bglpat-[\w-]{8,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bxox[abeprs]-[\w-]{10,}|\bAIza[\w-]{30,}|\bya29\.[\w-]{20,}"
    r"|\bsk-[\w-]{16,}|\b[rs]k_(?:live|test)_\w{16,}|\bdapi[0-9a-f]{32}|\bnpm_[A-Za-z0-9]{30,}"
    r"|\bLS0tLS1CRUdJTiB(?!DRVJU)[A-Za-z0-9+/=]{20,}"
)
HUB_TOKEN_PATTERN = "hf_[A-Za-z0-9]{16,}"
"""User access token of the Hub: 34 letters after hf_ today; half of that is still no word."""
_URI_PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HINTED_PASSWORD = re.compile(r"(?<=://)(?<!hf://)[^/@\s\"]+(?=@)")
"""User part of a URI in a hint; a hint writes revisions on the Hub as hf://NAME@REVISION."""
_LONG_WORD = re.compile(r"[^\s\"',;]{201,}")
CUT = "..."
"""End of a value or text that is longer than a message shows."""
_MOST_HINT = 1000
"""Maximum characters of a hint: several times the need of any but one with long values of a job."""


@dataclass(frozen=True)
class Problem:
    """Reason why a document is refused."""

    path: str
    """Field, as `format_path` writes it; empty for the document as a whole."""
    value: str | None
    """Short form of the offending value from `describe_value`; None if there is none to show."""
    rule: str
    """Rule that must hold, as a sentence without its full stop."""
    remedy: Hint
    """Change of the document that solves it, or advice as a sentence without its full stop."""
    line: int | None = None
    """Line of the file, from 1; None when the problem does not come from a file."""
    column: int | None = None
    """Column of that line in characters, from 1; None as for `line`."""
    reason: Reason = "Invalid"
    follows: str = ""
    """Rules that the value of the remedy breaks, with their hints, to follow its text."""

    @property
    def hint(self) -> str:
        """Hint at the solution, as a sentence without its full stop."""
        return hint_text(self.remedy, self.path) + self.follows


def holds_secret(text: str) -> bool:
    """Return True if a part of `text` has the form of a credential."""
    return SECRET_TEXT.search(text) is not None


def presentable(hint: str) -> str:
    """Return a hint without credentials, which values of a job may have brought into it, and with long values cut."""
    hint = _HINTED_PASSWORD.sub(HIDDEN, SECRET_TEXT.sub(HIDDEN, hint))
    hint = _LONG_WORD.sub(lambda word: f"{word[0][:197]}{CUT}", hint)
    return hint if len(hint) <= _MOST_HINT else f"{hint[: _MOST_HINT - len(CUT)]}{CUT}"


def is_secret_name(name: str) -> bool:
    """Return True if a value of this name is a credential, e.g. `HF_TOKEN` and `awsSecretAccessKey`; `secretName` and
    `key` name a Secret and its entry, which are no credentials.
    """
    return _SECRET_NAME.search(name) is not None


def format_path(path: Sequence[PathPart]) -> str:
    """Write a path as `spec.dataset.columns["my col"][0]`: quoted where a dot would not read back."""
    written = ""
    for part in path:
        if isinstance(part, int):
            written += f"[{part}]"
        elif _PLAIN_NAME.fullmatch(part):
            written += f".{part}" if written else part
        else:
            written += f"[{json.dumps(part, ensure_ascii=False)}]"
    return written


def any_of(choices: Sequence[object]) -> str:
    """Return `choices` as text: `a, b or c`."""
    return _joined(choices, " or ")


def all_of(parts: Sequence[object]) -> str:
    """Return `parts` as text: `a, b and c`."""
    return _joined(parts, " and ")


def _joined(parts: Sequence[object], last: str) -> str:
    texts = [str(part) for part in parts]
    return last.join([", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts)


def describe_value(value: object, path: Sequence[PathPart] = (), limit: int = 60) -> str:
    """Show a value in at most about `limit` characters, and nothing of it if it may be a credential.

    Text under a name such as `hubToken` or `password` is hidden entirely; elsewhere, text in the form of a token and
    the user part of a URI are hidden. Objects and lists are shown by their size only, as they may hold anything.
    """
    match value:
        case dict():
            return f"an object with {len(value)} field{'' if len(value) == 1 else 's'}"
        case list() | tuple():
            return f"a list of {len(value)} item{'' if len(value) == 1 else 's'}"
        case str():
            if path and isinstance(path[-1], str) and is_secret_name(path[-1]):
                return HIDDEN
            text = _URI_PASSWORD.sub(HIDDEN, SECRET_TEXT.sub(HIDDEN, value))
            shown = text if len(text) <= limit else text[: limit - 3] + "..."
            return json.dumps(shown, ensure_ascii=False)
        case None | bool():
            return json.dumps(value)
        case _:
            text = str(value)
            return text if len(text) <= limit else text[: limit - 3] + "..."


_NOT_TEXT = re.compile(r"[-+]?[\d.][\d.:_]*(?:e[-+]?\d+)?|y|n|yes|no|on|off|true|false|null", re.IGNORECASE)
"""Text that a reader of YAML takes for a number, a boolean or nothing."""


def shown_value(value: JsonValue, field: str = "") -> str:
    """Return a value for the field at the dotted path as YAML in one line; credentials are hidden."""
    match value:
        case dict():
            parts = (f"{shown_value(name)}: {shown_value(inner, name)}" for name, inner in value.items())
            return presentable(f"{{{', '.join(parts)}}}")
        case list():
            return presentable(f"[{', '.join(map(shown_value, value))}]")
    shown = describe_value(value, field.split("."), limit=200)
    plain = isinstance(value, str) and re.fullmatch(r"[\w./][\w./:@*%~+-]*", value) and not _NOT_TEXT.fullmatch(value)
    return shown[1:-1] if plain else shown


def hint_text(hint: Hint, path: str) -> str:
    """Return a hint for the field at the dotted `path` as a sentence without its full stop."""
    match hint:
        case Rename(name, note):
            return f"did you mean {name}?{aside(note)}"
        case Move(places):
            parents = [place.rpartition(".")[0] for place in places]
            if not all(parents):
                return "move it to the top level of the document, next to kind"
            name = places[0].rpartition(".")[2]
            return f"move it below {any_of(parents)}{'' if path.rpartition('.')[2] == name else f', as {name}'}"
        case SetTo(fields, note):
            steps = [f"{field} to {shown_value(value, field)}" for field, value in fields.items()]
            return presentable(f"set {all_of(steps)}{aside(note)}")
        case Drop(reason):
            return presentable(f"leave it out: {reason}" if reason else "leave it out")
        case ReplaceBy(value, note, words):
            return presentable((words or f"write {shown_value(value, path)}") + aside(note))
    return hint


def aside(note: str) -> str:
    """Return a note as it follows a hint."""
    return "" if not note else f", {note}" if note.startswith("which ") else f" ({note})"


def hint_data(problem: Problem) -> dict[str, JsonValue] | None:
    """Return the remedy of a problem for programs: its kind and its parts. None: it is advice to a person, or holds a
    value that is not shown.
    """
    if isinstance(problem.remedy, str) or HIDDEN in problem.hint or CUT in problem.hint:
        return None
    parts = {name: value for name, value in asdict(problem.remedy).items() if value not in ("", None)}
    return {"kind": type(problem.remedy).__name__, **parts}
