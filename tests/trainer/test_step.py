"""One optimizer step by itself: without a loop, a clock or reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROWS = 4


def test_step_over_uneven_micro_batches_is_one_over_the_global_batch(tmp_path: Path):
    import torch
    from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

    from finetune_trainer.strategies.single import Single
    from finetune_trainer.training.engine import engine_of
    from finetune_trainer.training.loop_parts import LoopModel
    from finetune_trainer.training.step import OptimizerStep, StepBatch

    torch.manual_seed(0)
    ids, labels = torch.randint(0, 50, (ROWS, 8)), torch.tensor([0, 1, 1, 0])
    kept: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(**sizes, intermediate_size=16, **kept))
    settings: dict[str, Any] = {"use_cpu": True, "max_steps": 3, "optim": "sgd", "max_grad_norm": 0.0, "report_to": []}
    args = TrainingArguments(str(tmp_path), learning_rate=0.5, lr_scheduler_type="linear", **settings)
    strategy, parts = Single("fp32"), list[str]()
    engine = engine_of(model, args, strategy, adapted=False)
    engine.start(lambda model: model(input_ids=ids, labels=labels).loss)
    step = OptimizerStep(engine, LoopModel(model, strategy, "sgd"), parts.append)

    loss = model(input_ids=ids, labels=labels).loss
    bias = model.classifier.bias
    (gradient,) = torch.autograd.grad(loss, bias)
    expected = bias.detach() - 0.5 * gradient
    batches = [
        StepBatch({"input_ids": ids[rows], "labels": labels[rows]}, [len(ids[rows])])
        for rows in (slice(3), slice(3, None))
    ]
    done = step.take(batches, ROWS)
    assert float(done.loss) == pytest.approx(float(loss.detach()))
    assert torch.allclose(bias, expected)
    assert bias.grad is None
    assert (done.learning_rate, engine.schedule.get_last_lr()[0]) == (0.5, pytest.approx(0.5 * 2 / 3))
    assert parts == [*["data", "forward", "backward", "rest"] * 2, "optimizer"]
