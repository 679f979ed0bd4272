"""Kubernetes' own rules for names, labels and folders, from apimachinery's validation."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping

from pydantic import JsonValue

from finetune_operator.spec.fields.field_values import Path
from finetune_operator.spec.problems import Problem, describe_value, format_path
from finetune_operator.spec.types import DNS_LABEL_PATTERN

NAME_PATTERN = DNS_LABEL_PATTERN
"""RFC 1123 label: names of children, pods and hosts derive from the job's name."""
MAX_NAME = 63
DNS_LABEL_RULE = f"must have at most {MAX_NAME} characters: a-z, 0-9 and -, and must not begin or end with -"
LABEL_KEY_RULE = (
    "a label key is an optional DNS name and /, and a name of at most 63 letters, digits, -, _ and . that begins and "
    "ends with a letter or digit"
)
LABEL_VALUE_RULE = (
    "a label value has at most 63 letters, digits, -, _ and ., and begins and ends with a letter or digit"
)
_NAME = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)")
LABEL_VALUE_PATTERN = f"^{_NAME.pattern}?$"
"""Same form as a label's name, or empty."""
_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def is_dns_label(text: str) -> bool:
    """Return True for a label of RFC 1123, at most 63 characters."""
    return len(text) <= MAX_NAME and re.fullmatch(NAME_PATTERN.strip("^$"), text) is not None


def is_label_key(text: str) -> bool:
    """Return True for a qualified name: `app`, `example.com/app`."""
    prefix, slash, name = text.rpartition("/")
    prefix_fits = not slash or (len(prefix) <= 253 and _PREFIX.fullmatch(prefix) is not None)
    return prefix_fits and _NAME.fullmatch(name) is not None


def is_label_value(text: str) -> bool:
    """Return True for the form of a label's name, or an empty text."""
    return not text or _NAME.fullmatch(text) is not None


def quote(path: Path, value: JsonValue) -> Problem:
    """Return the problem of a number or boolean in place of text."""
    return Problem(format_path(path), describe_value(value, path), "must be text", "put the value in quotes")


def label_problems(labels: Mapping[str, JsonValue], path: Path, hint: str) -> Iterator[Problem]:
    """Yield the problems of a map of labels at `path`; `hint` is for values of another form."""
    for key, text in labels.items():
        full = (*path, key)
        if not is_label_key(key):
            yield Problem(format_path(full), None, LABEL_KEY_RULE, "change the key")
        if not isinstance(text, str):
            yield quote(full, text)
        elif not is_label_value(text):
            yield Problem(format_path(full), describe_value(text, full), LABEL_VALUE_RULE, hint)


def normal_folder(folder: str) -> str:
    """Return the folder that the absolute path names. POSIX keeps two slashes at the start, which mean one on Linux."""
    return "/" + posixpath.normpath(folder).lstrip("/")
