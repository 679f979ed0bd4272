"""The value of a YAML scalar, as go-yaml v2 resolves it for sigs.k8s.io/yaml.

kubectl and PyYAML disagree on the meaning of a plain word: `2e-5` is a number for kubectl and text for PyYAML, `1:30`
is text for kubectl and 90 for PyYAML, `y` is true for kubectl only. The rules here are kubectl's. Numbers come out as
the API server stores them: those that Go's JSON encoder writes without a fraction and that fit 64 signed bits are ints
(`1e3`, `2.0` and `-0.0` are 1000, 2 and 0), all others are floats. Explicit tags beyond those of JSON's own types are
refused: JSON has no such types, and kubectl quietly reads them as text.
"""

import math
import re
import struct
from decimal import Decimal

JsonScalar = str | int | float | bool | None

STANDARD_TAG = "tag:yaml.org,2002:"
_TYPE_OF_TAG: dict[str, tuple[type, ...]] = {
    f"{STANDARD_TAG}bool": (bool,),
    f"{STANDARD_TAG}int": (int,),
    f"{STANDARD_TAG}float": (float, int),
    f"{STANDARD_TAG}null": (type(None),),
}
TEXT_TAGS = frozenset({"!", f"{STANDARD_TAG}str"})

_NAMED_VALUES: dict[str, bool | float | None] = {
    **{word: True for base in ("y", "yes", "true", "on") for word in (base, base.capitalize(), base.upper())},
    **{word: False for base in ("n", "no", "false", "off") for word in (base, base.capitalize(), base.upper())},
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
    **{sign + word: math.inf for sign in ("", "+") for word in (".inf", ".Inf", ".INF")},
    **{f"-{word}": -math.inf for word in (".inf", ".Inf", ".INF")},
}
_INTEGER = re.compile(r"([-+]?)(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|0[oO]?([0-7]+)|(0|[1-9][0-9]*))")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
# Go's own rule for underscores, single and between digits; elsewhere go-yaml strips them all beforehand.
_LEADING_DOT_FLOAT = re.compile(r"\.[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+(?:_[0-9]+)*)?")

_INT64_MIN, _INT64_MAX, _UINT64_MAX = -(2**63), 2**63 - 1, 2**64 - 1


class NotResolvableError(ValueError):
    """A scalar's text does not fit its explicit tag; the message is the rule that it breaks."""


def resolve(text: str, tag: str | None, plain: bool) -> JsonScalar:
    """Return the value of a scalar with this text.

    `tag` is the explicit tag or None, `plain` is True for text without quotes. Floats may be infinite or NaN here, and
    integers may lie between int64 and uint64; `as_stored` converts both to values that JSON can hold.

    Raises NotResolvableError for a tag that JSON has no type for, and for text that is not of the tag's type.
    """
    if tag in TEXT_TAGS or (tag is None and not plain):
        return text
    value = _resolve_plain(text)
    if tag is None:
        return value
    if tag not in _TYPE_OF_TAG:
        raise NotResolvableError(f"the tag {tag_shown(tag)} names a type that JSON does not have")
    fits = isinstance(value, _TYPE_OF_TAG[tag]) and (tag.endswith(":bool") or not isinstance(value, bool))
    # go-yaml widens signed integers only.
    if fits and tag.endswith(":float") and isinstance(value, int):
        fits = value <= _INT64_MAX
        value = float(value)
    if not fits:
        raise NotResolvableError(f"the tag {tag_shown(tag)} does not fit this text")
    return value


def _resolve_plain(text: str) -> JsonScalar:
    if text in _NAMED_VALUES:
        return _NAMED_VALUES[text]
    if text.startswith("."):
        number = float(text) if _LEADING_DOT_FLOAT.fullmatch(text) else math.inf
        return number if math.isfinite(number) else text
    if not text.startswith(tuple("+-0123456789")):
        return text
    digits = text.replace("_", "")
    integer = _integer(digits)
    if integer is not None:
        return integer
    # A number that overflows a float (1e400) is text for Go, since its parser reports the range error.
    number = float(digits) if _FLOAT.fullmatch(digits) else math.inf
    return number if math.isfinite(number) else text


def _integer(digits: str) -> int | None:
    """Return the 64-bit integer that Go's ParseInt and ParseUint with base 0 read, if they do."""
    match = _INTEGER.fullmatch(digits)
    # 4300 decimal digits are the most that Python converts; 64 bits need 64 of the shortest base, so cut
    # long before.
    if match is None or len(digits.lstrip("+-").lstrip("0xXbBoO")) > 64:
        return None
    sign, hexadecimal, binary, octal, decimal = match.groups()
    if hexadecimal is not None:
        size = int(hexadecimal, 16)
    elif binary is not None:
        size = int(binary, 2)
    elif octal is not None:
        size = int(octal, 8)
    else:
        size = int(decimal)
    if sign == "-":
        return -size if -size >= _INT64_MIN else None
    # ParseUint takes no sign, so `+` reaches only to int64.
    return size if size <= (_INT64_MAX if sign else _UINT64_MAX) else None


def as_stored(value: JsonScalar) -> JsonScalar:
    """Return the value after the way through Go's JSON: encoded by kubectl, decoded by the API server.

    Raises NotResolvableError for infinities and NaN, which JSON cannot write.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if isinstance(value, int):
        return value if _INT64_MIN <= value <= _INT64_MAX else float(value)
    if not math.isfinite(value):
        raise NotResolvableError("JSON, and so the Kubernetes API, has no infinity and no NaN")
    # repr gives the shortest digits that name this float, as Go's encoder does; int(value) would give
    # others above 2**53.
    written = Decimal(repr(value))
    if written == written.to_integral_value() and _INT64_MIN <= written <= _INT64_MAX:
        return int(written)
    return value


def as_key(value: JsonScalar) -> str:
    """Return the field name that a scalar key becomes: true, 1 and 1.5 are names too.

    Raises NotResolvableError for null and for integers beyond 64 signed bits, for which sigs.k8s.io/yaml has no name.
    """
    match value:
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case int() if _INT64_MIN <= value <= _INT64_MAX:
            return str(value)
        case float():
            return _single_precision(value)
        case _:
            raise NotResolvableError("a field name must be text; null and integers beyond 64 bits cannot become one")


def _single_precision(value: float) -> str:
    """Return a float as Go's FormatFloat(value, 'g', -1, 32) writes it: shortest digits in single precision."""
    if math.isnan(value):
        return ".nan"
    try:
        single: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        single = math.copysign(math.inf, value)
    if math.isinf(single):
        return ".inf" if single > 0 else "-.inf"
    shortest = next(
        text
        for text in (f"{single:.{digits}e}" for digits in range(9))
        if struct.pack("f", float(text)) == struct.pack("f", single)
    )
    mantissa, exponent = shortest.split("e")
    # Go's %g with the shortest digits: fixed point for exponents from -4 to 5.
    if -4 <= int(exponent) < 6:
        return format(Decimal(mantissa).scaleb(int(exponent)).normalize(), "f")
    return f"{mantissa}e{exponent}"


def tag_shown(tag: str) -> str:
    """Return a tag as people write it: `!!int`, not its URI; cut to 60 characters."""
    written = tag.replace(STANDARD_TAG, "!!")
    return written if len(written) <= 60 else f"{written[:57]}..."
