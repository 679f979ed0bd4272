"""Python's search for garbage in cycles, which a process leaves alone while it starts.

Some 4,000 modules are imported for a stage. They make a million objects that stay, and the search, begun again for each
700 of them, takes a fifth of the CPU time of a start.
"""

from __future__ import annotations

import gc


def put_off() -> None:
    """Search for nothing until `begin`: to be called before the heavy imports."""
    gc.disable()


def begin() -> None:
    """Search from now on, but not in what is there by now: to be called before data is read and weights are loaded,
    whose garbage would take memory.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def begin_with_models() -> None:
    """`begin`, once what every model of transformers needs is imported, which would come with the first of them."""
    import transformers.modeling_layers  # noqa: F401

    begin()
