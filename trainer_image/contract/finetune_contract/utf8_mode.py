"""Python's UTF-8 mode, for processes that open files by names from YAML and JSON, which may have any letter."""

from __future__ import annotations

import codecs
import sys


def utf8_command() -> list[str] | None:
    """Return the command that starts this process again in UTF-8 mode, if the names of its files are ASCII now:
    `PYTHONUTF8=0` in the locale C, where Python's default would be UTF-8. Other encodings stay, as files on such a
    machine have names in them.
    """
    if codecs.lookup(sys.getfilesystemencoding()).name != "ascii":
        return None
    # With the option, as Python may have been told to ignore the variable.
    return [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
