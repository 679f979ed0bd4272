"""Committed files equal those generated from torch, transformers and DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import pytest

from generate import FROM_TRAINER

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", FROM_TRAINER)
def test_generated_file_is_up_to_date(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == FROM_TRAINER[path](), "run: make generate"
