"""Takes secrets out of what others may read.

Two kinds of them are known: values that stand where secrets stand (a variable called HF_TOKEN, a header, the user part
of a URL), and words that look like one wherever they are. Values of the first kind are taken out of everything, also
of the logs in which a program may have printed them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from finetune_operator.api.problems import HIDDEN, SECRET_TEXT, SECRET_WORD, is_secret_name

_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_END_OF_KEY = re.compile(r"\A.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL)
"""Without the beginning: the end of a log may begin in the middle of a key."""
_USER_INFO = re.compile(r"(?<=://)[^/@\s:]+(?::[^/\s]*)?@")
_BEARER = re.compile(r"(?i)(\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=\-]{8,}")
_QUOTED = r"""(?:"(?:[^"\\]|\\[\s\S])*+"|'(?:[^'\\]|\\[\s\S])*+'|["'][^"'\n]*)"""
"""A text in quotes; the last one may have lost its end."""
_ASSIGNED = re.compile(
    rf"(?i)(?<![a-z0-9_\-])([a-z0-9_\-]*?{SECRET_WORD})"
    r"((?:\\?[\"'])?\]?\s*[=:]\s*)"
    rf"(b?{_QUOTED}|\\\"[^\"]*\"|[^\s,;&\"'\\]+)"
)
"""`password=...` in a line of a log or in a query, `{'API_KEY': '...'}` as Python prints it, and JSON in JSON. A search
starts only where a name starts: started at each `-` of a name, it takes time quadratic in the length of the name.
"""
_OPTION = re.compile(rf"(?i)(?<![a-z0-9_\-])(--[a-z0-9_\-]*?{SECRET_WORD}[ \t]+)(?!-)({_QUOTED}|\S+)")
"""`--api-key ...` in a command line."""
_SIGNATURE = re.compile(r"(?i)([?&;](?:amp;)?(?:sig|[a-z0-9\-]{0,20}signature)=)[^\s&;\"']+")
"""Query parameters of signed addresses of object stores, which are credentials."""
_COOKIE = re.compile(r"(?i)(\bcookie[\"']?\s*:\s*[\"']?)[^\s\"'][^\r\n\"']*")
_LEAST = 4
"""Shorter values are words that are everywhere; taking them out would leave nothing readable."""


class Redactor:
    """Remembers the secrets that it has met, and takes them out of every text."""

    def __init__(self) -> None:
        self._met: set[str] = set()

    def learn(self, value: Any) -> None:
        """Meet the secrets of an object: first of all objects, then texts are rid of what any of them holds."""
        for secret in _secrets_in(value):
            if len(secret) >= _LEAST:
                self._met.add(secret)

    def text(self, text: str) -> str:
        """The text without secrets."""
        for secret in sorted(self._met, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        text = _END_OF_KEY.sub(HIDDEN, _PRIVATE_KEY.sub(HIDDEN, SECRET_TEXT.sub(HIDDEN, text)))
        text = _USER_INFO.sub(f"{HIDDEN}@", text)
        for pattern in (_BEARER, _OPTION, _SIGNATURE, _COOKIE):
            text = pattern.sub(rf"\1{HIDDEN}", text)
        return _ASSIGNED.sub(rf"\1\2{HIDDEN}", text)

    def value(self, value: Any) -> Any:
        """The object without secrets; its shape stays."""
        match value:
            case str():
                return self.text(value)
            case Mapping():
                if "name" in value and "value" in value and is_secret_name(str(value["name"])):
                    return {**{k: self.value(v) for k, v in value.items()}, "value": HIDDEN}
                return {str(key): self._of(str(key), one) for key, one in value.items()}
            case list() | tuple():
                return [self.value(one) for one in value]
            case _:
                return value

    def _of(self, name: str, value: Any) -> Any:
        return HIDDEN if isinstance(value, str) and value and is_secret_name(name) else self.value(value)


def _secrets_in(value: Any) -> Iterable[str]:
    match value:
        case Mapping():
            if isinstance(value.get("value"), str) and is_secret_name(str(value.get("name", ""))):
                yield value["value"]
            for key, one in value.items():
                if isinstance(one, str) and is_secret_name(str(key)):
                    yield one
                yield from _secrets_in(one)
        case list() | tuple():
            for one in value:
                yield from _secrets_in(one)
        case str():
            for found in _USER_INFO.findall(value):
                user, colon, password = found.removesuffix("@").partition(":")
                yield password if colon else user
