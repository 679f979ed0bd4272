"""Python's UTF-8 mode, for processes that open files by names from YAML and JSON, which may have any letter."""

from __future__ import annotations

import codecs
import os
import sys


def require_utf8() -> None:
    """Start this process again in UTF-8 mode if the names of its files are ASCII: `PYTHONUTF8=0` in the locale C, where
    Python's default would be UTF-8. Processes that it starts inherit the mode. Other encodings stay, as files on such a
    machine have names in them.
    """
    if codecs.lookup(sys.getfilesystemencoding()).name == "ascii":
        os.environ["PYTHONUTF8"] = "1"
        # With the option, as Python may have been told to ignore the variable.
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
