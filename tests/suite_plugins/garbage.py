"""Garbage collection in the processes of pytest: none while test files are imported, later none of imported objects.

A full collection over torch, transformers and thousands of collected tests takes half a second, and many tests of a
tiny model trigger one. Objects created by tests are collected as usual.
"""

from __future__ import annotations

import gc

import pytest

gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Exempt all current objects before the tests start."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Unfreeze for the interpreter's last collection: nanobind reports remaining objects as leaks."""
    gc.unfreeze()
