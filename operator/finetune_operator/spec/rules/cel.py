"""CEL of rules, read here as the API server reads it: a rule is written once.

It is the part of the Common Expression Language (https://github.com/google/cel-spec) that rules use: operators, `has`,
`type`, `int`, `double`, `size`, tests of text, and the macros `all`, `exists`, `exists_one` and `filter`. Fields are
those of the models, and one that is None is absent. An operand that decides `&&` or `||` must stand first, while CEL
would pass over an error in the other; a test compares all rules with the API server.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, TypeAlias

from pydantic.alias_generators import to_snake

Scope: TypeAlias = Mapping[str, Any]
Expression: TypeAlias = Callable[[Scope], Any]
"""Value of an expression, from the values of its names."""

_TOKEN = re.compile(r"'(?:[^'\\]|\\.)*'|[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?|\w+|[=!<>]=|&&|\|\||\S")
_BINARY: tuple[Mapping[str, Callable[[Any, Any], Any]], ...] = (
    {
        "==": operator.eq, "!=": operator.ne, "<=": operator.le, ">=": operator.ge, "<": operator.lt,
        ">": operator.gt, "in": lambda value, values: value in values,
    },
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": operator.floordiv, "%": operator.mod},
)  # fmt: skip
"""Operators by precedence, the weakest first; rules divide integers only."""
_NAMES: Scope = {"true": True, "false": False, "int": int, "string": str}
_FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {"int": int, "double": float, "size": len, "type": type}
_METHODS: Mapping[str, Callable[..., Any]] = {
    "startsWith": str.startswith, "endsWith": str.endswith, "contains": operator.contains, "size": len,
    "matches": lambda text, pattern: re.search(pattern.replace("$", r"\Z"), text) is not None,
}  # fmt: skip
_MACROS: Mapping[str, Callable[[list[Any], list[bool]], Any]] = {
    "all": lambda _, holds: all(holds),
    "exists": lambda _, holds: any(holds),
    "exists_one": lambda _, holds: sum(holds) == 1,
    "filter": lambda items, holds: [item for item, kept in zip(items, holds, strict=True) if kept],
}  # fmt: skip


def predicate(text: str) -> Callable[[object], bool]:
    """Return the test of a spec that CEL on `self` is. Raise SyntaxError, at its call, for CEL that is not read here.

    Alternatives are read when they are needed: most rules are about a field that a job does not have.
    """
    alternatives = [cache(partial(_read, tokens)) for tokens in _alternatives(_TOKEN.findall(text))]
    return lambda spec: any(alternative()({"self": spec}) for alternative in alternatives)


def _alternatives(tokens: list[str]) -> list[list[str]]:
    """Return the operands of `||` outside of brackets; the whole where a condition stands there."""
    alternatives: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in ("(", "[")) - (token in (")", "]"))
        if token == "?" and not depth:
            return [tokens]
        if token == "||" and not depth:
            alternatives.append([])
        else:
            alternatives[-1].append(token)
    return alternatives


def _read(tokens: list[str]) -> Expression:
    reader = _Reader(tokens)
    value = reader.expression()
    if reader.token:
        raise SyntaxError(f"{reader.token} is not expected in {' '.join(tokens)}")
    return value


class _Reader:
    """Reads an expression by recursive descent."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens: Iterator[str] = iter(tokens)
        self.token = next(self._tokens, "")

    def _take(self, *expected: str) -> str:
        """Return the token, and go to the next one, if it is one of `expected` (none: anything); else return ""."""
        token = self.token
        if expected and token not in expected:
            return ""
        self.token = next(self._tokens, "")
        return token

    def expression(self) -> Expression:
        condition = self._or()
        if not self._take("?"):
            return condition
        first = self.expression()
        self._require(":")
        other = self.expression()
        return lambda scope: first(scope) if condition(scope) else other(scope)

    def _require(self, token: str) -> None:
        if not self._take(token):
            raise SyntaxError(f"{token} is expected at {self.token}")

    def _or(self) -> Expression:
        parts = [self._and()]
        while self._take("||"):
            parts.append(self._and())
        return parts[0] if len(parts) == 1 else lambda scope: any(part(scope) for part in parts)

    def _and(self) -> Expression:
        parts = [self._binary(0)]
        while self._take("&&"):
            parts.append(self._binary(0))
        return parts[0] if len(parts) == 1 else lambda scope: all(part(scope) for part in parts)

    def _binary(self, level: int) -> Expression:
        if level == len(_BINARY):
            return self._unary()
        left = self._binary(level + 1)
        while sign := self._take(*_BINARY[level]):
            left = partial(_compute, _BINARY[level][sign], left, self._binary(level + 1))
        return left

    def _unary(self) -> Expression:
        if self._take("!"):
            negated = self._unary()
            return lambda scope: not negated(scope)
        if self._take("-"):
            number = self._unary()
            return lambda scope: -number(scope)
        value = self._primary()
        while self._take("."):
            name = self._take()
            value = self._call(name, value) if self._take("(") else partial(_field, value, to_snake(name))
        return value

    def _primary(self) -> Expression:
        token = self._take()
        if token == "(":
            inner = self.expression()
            self._require(")")
            return inner
        if token == "[":
            items = self._arguments("]")
            return lambda scope: [item(scope) for item in items]
        if token[:1] == "'" or token[:1].isdigit():
            literal = ast.literal_eval(token)
            return lambda scope: literal
        if self._take("("):
            (argument,) = self._arguments(")")
            if token == "has":
                return lambda scope: argument(scope) is not None
            function = _FUNCTIONS[token]
            return lambda scope: function(argument(scope))
        return lambda scope: _NAMES[token] if token in _NAMES else scope[token]

    def _call(self, name: str, value: Expression) -> Expression:
        """Read the arguments of a method, or of a macro, whose first one is the name of an item."""
        if name in _MACROS:
            item = self._take()
            self._require(",")
            (holds,) = self._arguments(")")
            return partial(_over_items, _MACROS[name], value, item, holds)
        method, arguments = _METHODS[name], self._arguments(")")
        return lambda scope: method(value(scope), *(argument(scope) for argument in arguments))

    def _arguments(self, end: str) -> list[Expression]:
        arguments: list[Expression] = []
        while not self._take(end):
            arguments.append(self.expression())
            self._take(",")
        return arguments


def _compute(sign: Callable[[Any, Any], Any], left: Expression, right: Expression, scope: Scope) -> Any:
    return sign(left(scope), right(scope))


def _field(value: Expression, name: str, scope: Scope) -> Any:
    return getattr(value(scope), name)


def _over_items(
    macro: Callable[[list[Any], list[bool]], Any], value: Expression, item: str, holds: Expression, scope: Scope
) -> Any:
    items = list(value(scope))
    return macro(items, [bool(holds({**scope, item: element})) for element in items])
