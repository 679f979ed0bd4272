"""A train stage whose loss is computed in chunks of few logits, as a large vocabulary's would be."""

from __future__ import annotations

import os
import sys
from typing import Any

from process_support.libraries import libraries


def train(arguments: list[str], logits: int) -> None:
    """Run the stage with at most `logits` at a time, print the number of chunks, and end the process with its code."""
    from finetune_contract import plans
    from finetune_trainer.__main__ import run
    from finetune_trainer.core.library_patches import sharded_cross_entropy
    from finetune_trainer.training.passes import chunked_loss

    plans.LOSS_LOGITS = logits
    compute = chunked_loss.ChunkedLoss._judge
    calls = 0

    def counted(loss: Any, *part: Any) -> Any:
        nonlocal calls
        calls += 1
        return compute(loss, *part)

    chunked_loss.ChunkedLoss._judge = counted  # type: ignore[method-assign]
    install, divided = sharded_cross_entropy.install, 0

    def noted() -> Any:
        nonlocal divided
        divided += 1
        return install()

    object.__setattr__(sharded_cross_entropy, "install", noted)
    before = libraries()
    code = run(arguments)
    print(f"{calls} chunks were computed")
    print(f"divided over the vocabulary: {divided}")
    print(f"libraries are as before: {libraries() == before}")
    sys.stdout.flush()
    os._exit(code)
