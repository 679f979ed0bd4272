"""Redaction of secrets in data that others may read.

Two kinds are known: values in places of secrets (a variable named HF_TOKEN, a header, the user part of a URL), and
texts that look like one anywhere. Values of the first kind are removed everywhere, also from logs in which a program
may have printed them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from finetune_operator.spec.problems import HIDDEN, SECRET_NAME_END, SECRET_TEXT, is_secret_name

_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_END_OF_KEY = re.compile(r"\A.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL)
"""End of a private key: the tail of a log may begin in the middle of a key."""
_USER_INFO = re.compile(r"(?<=://)[^/@\s:]+(?::[^/\s]*)?@")
_BEARER = re.compile(r"(?i)(\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=\-]{8,}")
_QUOTED = r"""(?:"(?:[^"\\]|\\[\s\S])*+"|'(?:[^'\\]|\\[\s\S])*+'|["'][^"'\n]*)"""
"""Quoted text; the last alternative may lack its closing quote."""
_ASSIGNED = re.compile(
    rf"(?i)(?<![a-z0-9_\-])([a-z0-9_\-]*?{SECRET_NAME_END})"
    r"((?:\\?[\"'])?\]?\s*[=:]\s*)"
    rf"(b?{_QUOTED}|\\\"[^\"]*\"|[^\s,;&\"'\\]+)"
)
"""`password=...` in a line of a log or in a query, `{'API_KEY': '...'}` as Python prints it, and JSON in JSON. A search
starts only where a name starts: started at each `-` of a name, it takes time quadratic in the length of the name.
"""
_OPTION = re.compile(rf"(?i)(?<![a-z0-9_\-])(--[a-z0-9_\-]*?{SECRET_NAME_END}[ \t]+)(?!-)({_QUOTED}|\S+)")
"""`--api-key ...` in a command line."""
_SPOKEN = re.compile(r"(?i)(\b(?:api|access|secret)[ _-]?key\s+(?:is\s+)?)[A-Za-z0-9_\-]{20,}")
"""`api key 0123...` as programs say it."""
_PHRASE = re.compile(
    r"(?i)(?<![a-z0-9_\-])([a-z0-9_\-]*?(?:password|passphrase|passcode)[ \t]*:[ \t]+)(?![\s\"'{\[])[^\r\n]+"
)
"""`password: several words`, up to the end of the line."""
_SIGNATURE = re.compile(r"(?i)([?&;](?:amp;)?(?:sig|[a-z0-9\-]{0,20}signature)=)[^\s&;\"']+")
"""Query parameters of presigned object store URLs, which are credentials."""
_COOKIE = re.compile(r"(?i)(\bcookie[\"']?\s*:\s*[\"']?)[^\s\"'][^\r\n\"']*")
_LEAST = 4
"""Minimum length of a redacted value: shorter ones occur everywhere, and redacting them would make texts unreadable."""


class Redactor:
    """Collector of secrets that removes them from every text."""

    def __init__(self) -> None:
        self._secrets: set[str] = set()

    def learn(self, value: Any) -> None:
        """Remember the secrets of an object. Call it for all objects before redacting texts."""
        for secret in _secrets_in(value):
            if len(secret) >= _LEAST:
                self._secrets.add(secret)

    def text(self, text: str) -> str:
        """Return the text without secrets."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        text = _END_OF_KEY.sub(HIDDEN, _PRIVATE_KEY.sub(HIDDEN, SECRET_TEXT.sub(HIDDEN, text)))
        text = _USER_INFO.sub(f"{HIDDEN}@", text)
        for pattern in (_BEARER, _OPTION, _SPOKEN, _PHRASE, _SIGNATURE, _COOKIE):
            text = pattern.sub(rf"\1{HIDDEN}", text)
        return _ASSIGNED.sub(rf"\1\2{HIDDEN}", text)

    def value(self, value: Any) -> Any:
        """Return the object without secrets, in the same shape."""
        match value:
            case str():
                return self.text(value)
            case Mapping():
                if "name" in value and "value" in value and is_secret_name(str(value["name"])):
                    return {**{k: self.value(v) for k, v in value.items()}, "value": HIDDEN}
                return {str(key): self._field_value(str(key), one) for key, one in value.items()}
            case list() | tuple():
                return [self.value(one) for one in value]
            case _:
                return value

    def _field_value(self, name: str, value: Any) -> Any:
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
            for user_info in _USER_INFO.findall(value):
                user, colon, password = user_info.removesuffix("@").partition(":")
                yield password if colon else user
