"""Attention masks are omitted for batches without padding, without reading the device, and built for others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def models(tiny_family: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A decoder, and an encoder that sees all tokens."""
    from transformers import AutoModel

    folder = tmp_path_factory.mktemp("models")
    return {
        family: AutoModel.from_pretrained(tiny_family(folder / family, family), attn_implementation="sdpa").eval()
        for family in ("llama", "bert")
    }


def batch(padded: bool) -> dict[str, Any]:
    import torch

    mask = torch.ones(2, 8, dtype=torch.int64)
    if padded:
        mask[1, 6:] = 0
    return {"input_ids": torch.arange(5, 21).reshape(2, 8), "attention_mask": mask}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_answers_are_those_of_a_model_that_looks_itself(family: str, padded: bool, models, monkeypatch):
    import torch
    from transformers import masking_utils

    from finetune_trainer.training.passes.known_padding import KnownPadding, known_padding

    given, model = batch(padded), models[family]
    seen = given["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**given).last_hidden_state[seen]

        def looks(padding_mask: Any, *_: Any) -> bool:
            assert padding_mask is None, "it looks at a mask"
            return True

        for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
            monkeypatch.setattr(masking_utils, name, looks)
        with known_padding(KnownPadding.of(given)):
            found = model(**given).last_hidden_state[seen]
    assert torch.allclose(found, expected, atol=1e-6)


def test_nothing_is_known_of_another_batch_or_of_a_mask_of_pairs_of_tokens():
    import torch

    from finetune_trainer.training.passes.known_padding import KnownPadding, known_padding

    assert KnownPadding.of({"input_ids": torch.ones(2, 8)}) is None
    assert KnownPadding.of({"attention_mask": torch.ones(2, 1, 8, 8)}) is None
    with known_padding(KnownPadding.of(batch(True))):
        assert KnownPadding.current == KnownPadding((2, 8), True)
    assert KnownPadding.current is None
