"""Garbage collection in the processes of pytest: none while test files are imported, later none of what they imported.

A search of torch, transformers and thousands of collected tests takes half a second, and many a test of a tiny model
causes one. What tests make themselves is collected as ever.
"""

from __future__ import annotations

import gc

import pytest

gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Begin with what is there by now exempt."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """The interpreter's last search finds everything: nanobind reports what it leaves as leaks."""
    gc.unfreeze()
