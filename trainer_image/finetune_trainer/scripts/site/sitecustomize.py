"""Start of every Python process of a user's program: arrange an orderly end, then import the hidden `sitecustomize`."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import sys
from pathlib import Path


def _settle() -> None:
    with contextlib.suppress(ImportError):  # the program's own Python, without the trainer
        from finetune_trainer.core.orderly_exit import let_collectives_end

        # Registered first, so it runs last.
        atexit.register(let_collectives_end)


def _import_next() -> None:
    """Import the `sitecustomize` that this one hides."""
    ours = sys.modules.pop("sitecustomize")
    folder = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != folder]
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        # The import that runs this module expects it there.
        sys.modules.setdefault("sitecustomize", ours)


if __name__ == "sitecustomize":
    _settle()
    _import_next()
