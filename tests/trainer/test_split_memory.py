"""Tensor, pipeline and sequence parallelism read a model as it is stored: a process has its part of it in memory, and
trains as if the whole model had been converted to fp32 before it was split.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from finetune_contract.trainer_job import Strategy
from finetune_trainer.checkpoint.tensor_files import mapped_tensors
from finetune_trainer.models.stored_weights import as_stored, log_private_weights, private_bytes
from finetune_trainer.strategies.parallel import whole_answers
from finetune_trainer.strategies.parallel.whole_answers import fp32_by_block, shared_from_first
from trainer_support.forking import fork_server

HALF = torch.bfloat16
ROWS = {"input_ids": torch.arange(3, 11).unsqueeze(0)}
PIPELINE = {"degree": 2, "micro_batches": 2, "schedule": "1f1b"}
LARGE = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8}
SMALL = {"vocab_size": 41, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not list a process's mappings in files")


def write_llama(folder: Path, dtype: torch.dtype = HALF, **config: Any) -> Path:
    """Write a decoder of 4 layers whose weights are stored in `dtype`, all of them numbers of bf16."""
    torch.manual_seed(3)
    shape = {"num_hidden_layers": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, **config}
    LlamaForCausalLM(LlamaConfig(**shape)).to(HALF).to(dtype).save_pretrained(folder)
    return folder


def write_small(folder: Path, family: str) -> None:
    """Write a decoder of 4 layers without dropout in bf16: of GPT-2 with Conv1D layers and tied embeddings, of
    StarCoder2 with biases.
    """
    torch.manual_seed(3)
    sizes = SMALL | {"num_hidden_layers": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    made = AutoConfig.for_model(family, **sizes, **(drops if family == "gpt2" else {"num_key_value_heads": 2}))
    model = AutoModelForCausalLM.from_config(made)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)  # biases, too
    model.to(HALF).save_pretrained(folder)


def as_it_is_stored(folder: Path) -> Any:
    return as_stored(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


# --------------------------------------------------------------------------------------------------- a block at a time


def test_model_as_stored_computes_in_fp32_with_one_block_converted(tmp_path: Path) -> None:
    model = as_it_is_stored(write_llama(tmp_path, **SMALL)).eval()
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()(**ROWS).logits
    stored = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    wide: list[int] = []

    def count(*_: Any) -> None:
        layers = model.model.layers
        wide.append(sum(layer.mlp.up_proj.weight.dtype == torch.float32 for layer in layers))

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(count)
    with fp32_by_block(model):
        assert torch.equal(model(**ROWS).logits, expected)
    assert wide == [1, 1, 1, 1]
    assert {weight.dtype for weight in model.parameters()} == {HALF}
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == stored


def test_weights_are_as_stored_after_a_block_fails(tmp_path: Path) -> None:
    model = as_it_is_stored(write_llama(tmp_path, **SMALL))

    def fail(*_: Any) -> None:
        raise ValueError("no memory for this block")

    failing = model.model.layers[2].mlp.register_forward_hook(fail)
    with pytest.raises(ValueError, match="no memory"), fp32_by_block(model):
        model(**ROWS)
    failing.remove()
    assert {weight.dtype for weight in model.parameters()} == {HALF}
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.fixture
def rank_of_two(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Any]]:
    """Return a function that makes this process a rank of two: it returns the values that rank 0 shares."""
    shared: list[Any] = []

    def share(value: Any) -> Any:
        if value is not None:
            shared.append(value)
        return shared[-1]

    monkeypatch.setattr(whole_answers, "patiently_shared", share)

    def become(rank: int) -> list[Any]:
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        return shared

    return become


def test_only_rank_0_computes_answers_and_all_get_them(rank_of_two: Callable[[int], list[Any]]) -> None:
    rank_of_two(0)
    assert shared_from_first(lambda: {"logits": 3}) == {"logits": 3}
    rank_of_two(1)
    assert shared_from_first(lambda: pytest.fail("rank 1 computes, too")) == {"logits": 3}


def test_failure_of_rank_0_is_raised_on_all_ranks(rank_of_two: Callable[[int], list[Any]]) -> None:
    def compute() -> None:
        raise MemoryError("8 GiB")

    rank_of_two(0)
    with pytest.raises(MemoryError):
        shared_from_first(compute)
    rank_of_two(1)
    with pytest.raises(RuntimeError, match=r"Rank 0 could not compute .* MemoryError: 8 GiB"):
        shared_from_first(compute)


@linux
def test_log_has_the_weights_that_are_not_mapped_from_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = as_it_is_stored(write_llama(tmp_path, **LARGE))
    assert private_bytes(mapped.parameters()) == 0
    size = sum(weight.nbytes for weight in mapped.parameters())
    mapped.lm_head.weight.data = mapped.lm_head.weight.data.clone()
    head = mapped.lm_head.weight.nbytes
    assert private_bytes(mapped.parameters()) == head
    monkeypatch.setattr("finetune_trainer.models.stored_weights._WORTH_WARNING", head)
    with caplog.at_level(logging.INFO):
        log_private_weights(mapped)
    assert f"holds {head / 2**30:.2f} of its {size / 2**30:.2f} GiB in its own memory" in caplog.text
    assert caplog.records[-1].levelno == logging.WARNING


# ------------------------------------------------------------------------------------------------------- two processes


WAYS: dict[str, dict[str, Any]] = {
    "tensor": {"name": "ddp", "tensor": 2},
    "pipeline": {"name": "ddp", "pipeline": PIPELINE},
    "sequence": {"name": "fsdp", "sequence": 2},
}


def two_processes(function: str, bench: Any, way: str, model: Path, out: Path, *, converted: bool) -> list[Any]:
    """Run a function of `process_support.split_memory` in two processes; return the result of each."""
    out.mkdir()
    training = bench.in_replicas(Strategy.model_validate(WAYS[way]), 1, 8).job.training.model_dump(
        mode="json", by_alias=True
    )
    codes, output = fork_server().run(
        {
            "processes": 2,
            "call": f"process_support.split_memory:{function}",
            "arguments": {"model": str(model), "training": training, "converted": converted, "out": str(out)},
            "environment": {},
            "log": str(out / "log"),
        }
    )
    assert codes == [0, 0], output
    return [json.loads((out / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama with 84 million weights, stored in bf16."""
    return write_llama(tmp_path_factory.mktemp("large"), **LARGE)


@pytest.mark.slow
@linux
@pytest.mark.parametrize("way", WAYS)
def test_process_has_no_more_than_its_part_in_memory(way: str, large: Path, bench: Any, tmp_path: Path) -> None:
    """In fp32 is half of the weights in each process; before that embeddings, head and one block, 40 % of them."""
    whole = 4 * sum(weight.numel() for weight in as_it_is_stored(large).parameters())
    stored, converted = (
        two_processes("prepared", bench, way, large, tmp_path / str(before), converted=before)
        for before in (False, True)
    )
    needed = min(figures["peak"] for figures in converted)
    assert needed > 0.97 * whole, converted
    # FSDP keeps parts of what it has divided, with and without slices of rows: from 0.1 to 0.4 of the weights, which
    # differs from run to run.
    most = 0.95 * needed if way == "sequence" else 0.75 * whole
    assert max(figures["peak"] for figures in stored) < most, stored
    assert max(figures["kept"] for figures in stored) < most, stored


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "family"), [*((way, family) for way in WAYS for family in ("llama", "gpt2")), ("tensor", "starcoder2")]
)
def test_training_is_that_of_a_model_converted_before(way: str, family: str, bench: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_small(folder, family)
    results = {
        before: two_processes("trained", bench, way, folder, tmp_path / str(before), converted=before)
        for before in (False, True)
    }
    assert results[False] == results[True]
    found, expected = (mapped_tensors(tmp_path / str(before) / "weights.safetensors") for before in (False, True))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
