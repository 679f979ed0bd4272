"""Console that shows control characters in text, which may be a pod's, instead of obeying them."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from finetune_operator.spec.printable import printable


class PrintableConsole(Console):
    """Console whose texts have no control characters; its own colours are no part of a text."""

    def render_str(self, text: str, **how: Any) -> Text:
        """Render as `Console` does."""
        return super().render_str(printable(text), **how)
