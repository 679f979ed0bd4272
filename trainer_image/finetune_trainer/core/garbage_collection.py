"""Python's cyclic garbage collection, which a process puts off while it starts.

A stage imports some 4,000 modules. They create a million objects that stay, and collection, run every 700 of them,
takes a fifth of the CPU time of a start.
"""

from __future__ import annotations

import gc


def put_off() -> None:
    """Disable collection until `begin`: call it before the heavy imports."""
    gc.disable()


def begin() -> None:
    """Enable collection, but not of the objects that exist by now: call it before reading data and loading weights,
    whose garbage would take memory.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def begin_with_models() -> None:
    """Call `begin` after importing the modules that every model of transformers needs."""
    import transformers.modeling_layers  # noqa: F401

    begin()
