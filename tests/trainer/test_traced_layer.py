"""Bytes that a transformer block saves, traced on fake tensors, and plans that rest on them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from finetune_contract.facts import ModelFacts
from finetune_contract.plans import COUNTED_FAMILIES
from finetune_contract.trainer_job import Strategy, TrainerJob, World
from finetune_operator.plan.memory.activation_shapes import counted_shapes
from finetune_operator.plan.memory.memory_workload import Workload
from finetune_trainer.report.measured_facts import model_facts
from finetune_trainer.report.traced_layer import TracedBlock, traced_block

ROWS, LENGTH = 2, 96
SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
COUNTED = ("gpt_neox", "llama", "opt", "phi3")
OTHERS = ("arcee", "exaone4", "helium", "persimmon")
"""Decoders without a formula, whose attention has no dropout."""


def config_of(family: str) -> Any:
    return AutoConfig.for_model(family, **SIZES, **({"ffn_dim": 160} if family == "opt" else {}))


def facts_of(family: str, folder: Path) -> ModelFacts:
    config_of(family).save_pretrained(folder)
    job = {"name": "j", "task": "text-generation", "model": {"uri": f"file://{folder}"}}
    return model_facts(TrainerJob.model_validate(job))


def planned(facts: ModelFacts, precision: Any = "fp32") -> int:
    world = World(nodes=1, processes_per_node=1, device="cpu", threads_per_process=1)
    strategy = Strategy(name="single")
    return Workload(facts, "text-generation", strategy, precision, "adamw", world, 1, LENGTH).saved_per_token


def measured(family: str, precision: str) -> float:
    """Return the bytes that a second layer adds to those that torch saves for a token."""
    found = []
    for layers in (1, 2):
        config = config_of(family)
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = config.layer_types[:1] * layers
        found.append(_saved(AutoModelForCausalLM.from_config(config).train(), precision))
    return (found[1] - found[0]) / (ROWS * LENGTH)


def _saved(model: PreTrainedModel, precision: str) -> int:
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}
    copies = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        model(input_ids=torch.ones((ROWS, LENGTH), dtype=torch.long))
    if precision == "bf16":  # autocast's copies of weights are another term of the plan
        copies = sum(
            2 * each.numel() for name, each in model.named_parameters() if ".layers." in name and each.ndim == 2
        )
    return sum(each.untyped_storage().nbytes() for each in kept.values()) - copies


def test_families_with_a_formula_are_those_that_are_not_traced():
    assert counted_shapes() <= set(COUNTED_FAMILIES)


@pytest.mark.parametrize("family", COUNTED)
def test_a_traced_block_saves_the_bytes_of_its_family_s_formula(family: str, tmp_path: Path):
    facts = facts_of(family, tmp_path)
    assert facts.saved_per_token == 0
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family))
    traced = traced_block(model)
    assert traced.per_token == pytest.approx(planned(facts), rel=0.05)
    assert traced.per_score == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", OTHERS)
def test_plans_of_other_families_count_the_saved_tensors(family: str, precision: str, tmp_path: Path):
    facts = facts_of(family, tmp_path)
    assert facts.saved_per_token > 0
    found = measured(family, precision)
    assert planned(facts, precision) == pytest.approx(found, rel=0.15)
    if precision == "fp32":
        assert planned(facts) == pytest.approx(found, rel=0.03)
        untraced = facts.model_copy(update={"saved_per_token": 0})
        assert abs(planned(untraced) / found - 1) > 0.1


def test_a_block_that_reads_values_is_not_traced_and_logged(caplog: pytest.LogCaptureFixture):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("arcee"))

    def read(module: Any, args: tuple[Any, ...]) -> None:
        assert float(args[0].sum()) >= 0

    model.model.layers[0].register_forward_pre_hook(read)
    with caplog.at_level(logging.INFO):
        assert traced_block(model) == TracedBlock()
    assert "count each block of arcee as one of BERT" in caplog.text
