"""torch.compile compiles one block for all, and a second time for all further lengths."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune_trainer.core.failures import StageError
from finetune_trainer.training.passes import compiled_blocks
from finetune_trainer.training.passes.compiled_blocks import CompiledBlocks, compile_blocks, with_working_compiler
from process_support.sliced import decoder

LENGTHS = (7, 7, 9, 12, 5)


def arguments(**changes: Any) -> Any:
    # This backend traces forward and backward pass and compiles nothing, so the test waits for no compiler.
    given = {"torch_compile": True, "torch_compile_backend": "aot_eager", "torch_compile_mode": None}
    return SimpleNamespace(**{**given, **changes})


def gradients(model: Any, length: int) -> list[torch.Tensor]:
    ids = torch.arange(2 * length).reshape(2, length) % 41
    model.zero_grad()
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    return [each.grad for each in model.parameters()]


def test_all_blocks_and_lengths_share_two_compilations():
    torch._dynamo.reset()
    plain, compiled = (decoder("llama", num_hidden_layers=4, use_cache=False).train() for _ in range(2))
    blocks = compile_blocks(compiled, arguments())
    blocks.assert_in_effect("single", requested=True)
    assert len(blocks.blocks) == 4
    before = blocks.figures()
    for length in LENGTHS:
        for mine, expected in zip(gradients(compiled, length), gradients(plain, length), strict=True):
            torch.testing.assert_close(mine, expected)
    after = blocks.figures()
    assert {name: after[name] - before[name] for name in after} == {"compilations": 2, "recompilations": 1}


def test_blocks_are_compiled_as_requested_only():
    model = decoder("llama")
    none = compile_blocks(model, arguments(torch_compile=False))
    none.assert_in_effect("single", requested=False)
    assert none.figures() == {}
    with pytest.raises(StageError, match="torch_compile is True, and 0 blocks are compiled"):
        none.assert_in_effect("single", requested=True)
    with pytest.raises(StageError, match="and 0 blocks are compiled"):
        CompiledBlocks(tuple(model.model.layers)).assert_in_effect("single", requested=True)


def broken(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("this backend compiles nothing")


def test_function_that_cannot_be_compiled_runs_as_it_is_by_plan_only(bench, monkeypatch, caplog):
    monkeypatch.setattr(compiled_blocks, "_why_not_compiled", lambda device: "")
    torch._dynamo.reset()
    plain, requested, planned = (decoder("llama", num_hidden_layers=2, use_cache=False).train() for _ in range(3))
    compile_blocks(requested, arguments(torch_compile_backend=broken))
    with pytest.raises(Exception, match="this backend compiles nothing"):
        gradients(requested, 7)
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    training = bench.with_training(arguments={"torch_compile": True}, compiles_by_plan=True).job.training
    assert with_working_compiler(training) == training
    blocks = compile_blocks(planned, arguments(torch_compile_backend=broken))
    for mine, expected in zip(gradients(planned, 7), gradients(plain, 7), strict=True):
        torch.testing.assert_close(mine, expected)
    assert blocks.figures()["failed_compilations"] >= 1  # then torch tries the functions that it calls
    assert "which ran uncompiled" in caplog.text
