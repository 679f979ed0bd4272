"""The plan's figures for adapters compared with peft and torch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from finetune_contract.facts import ModelFacts
from finetune_contract.trainer_job import Adapter, Strategy, TrainerJob, World
from finetune_operator.plan.memory.adapter_sizes import (
    four_bit_weights,
    narrow_weights,
    trained_parameters,
)
from finetune_operator.plan.memory.memory_workload import activation_bytes_per_token
from finetune_operator.plan.models.architectures import ARCHITECTURES, model_facts
from planning_support.workloads import adapter_of, work
from trainer_support.tasks import training_of

GROUPED: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""A small decoder with grouped queries."""
# Shapes with a different number in every place, so that a formula that mixes two of them up is found.
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96},
    "electra": {"embedding_size": 48, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96},
    "roberta": {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96},
    "xlm-roberta": {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96},
    "camembert": {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96},
    "longformer": {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "attention_window": 16},
    "distilbert": {"dim": 96, "n_heads": 6, "hidden_dim": 160, "n_layers": 3},
    "deberta-v2": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
    },
    "gpt2": {"n_embd": 96, "n_layer": 3, "n_head": 6, "n_positions": 256},
    "gemma": {**GROUPED, "head_dim": 32},
    "llama": GROUPED,
    "mistral": {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 16},
    "mixtral": {**GROUPED, "num_local_experts": 3},
    "modernbert": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "pad_token_id": 0,
    },
    "phi3": {**GROUPED, "pad_token_id": 0},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 32},
    "qwen3_moe": {
        **GROUPED,
        "head_dim": 32,
        "moe_intermediate_size": 24,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    },
    "t5": {"d_model": 64, "d_ff": 160, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "d_kv": 24},
}


def built(model_type: str, meta: bool = True, **changes: Any) -> tuple[Any, ModelFacts]:
    """Return the model as transformers builds it, and its facts by formula."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.AutoConfig.for_model(model_type, **(CONFIGS[model_type] | {"vocab_size": 1000} | changes))
    config.num_labels = 3
    with torch.device("meta" if meta else "cpu"):
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    return model, model_facts(config.to_dict(), labels=3)


def job_of(adapter: Adapter, precision: str = "fp32") -> TrainerJob:
    """Return the parts of a job that the trainer reads to adapt a model."""
    body = {"name": "a", "task": "text-classification", "model": {"uri": "hf://org/model"}}
    return TrainerJob.model_validate({**body, "training": training_of(steps=1, precision=precision)})


needs_four_bits = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed (finetune-trainer[qlora])"
)
METHODS = ["lora", pytest.param("qlora", marks=needs_four_bits), "dora"]


def test_every_architecture_with_a_formula_is_compared():
    assert tuple(sorted(CONFIGS)) == ARCHITECTURES


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_layers_head_and_trained_parameters_are_those_that_peft_makes(model_type, method):
    adapters = pytest.importorskip("finetune_trainer.models.adapters", reason="the trainer is not installed")
    facts_module = pytest.importorskip("finetune_trainer.report.measured_facts", reason="the trainer is not installed")
    model, facts = built(model_type)
    assert facts.linear_layers == facts_module._linear_layers(model)
    assert facts.head_parameters == adapters.head_parameters(model)
    shared = getattr(model.config, "num_key_value_heads", facts.attention_heads)
    assert (facts.key_value_heads or facts.attention_heads) == shared

    model, facts = built(model_type, meta=False)
    adapter = adapter_of(method)
    adapted = adapters.adapt(model, adapter, job_of(adapter))
    adapted.assert_in_effect(model)
    parts, held = trained_parameters(facts, adapter), four_bit_weights(facts, adapter)
    assert parts.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert facts.parameters + parts.added == sum(p.numel() for p in model.parameters()) + held - held // 8
    assert (held > 0) == (method == "qlora")


@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model_type", ["bert", "gpt2", "llama"])
def test_layer_with_an_adapter_keeps_about_the_tensors_torch_saves(model_type, precision, method, dropout):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    adapters = pytest.importorskip("finetune_trainer.models.adapters", reason="the trainer is not installed")
    adapter, rows, length, saved = adapter_of(method, rank=8, dropout=dropout), 4, 128, []
    field = "n_layer" if model_type == "gpt2" else "num_hidden_layers"
    for layers in (1, 2):
        changes = {field: layers, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
        model, facts = built(model_type, meta=False, **changes)
        adapters.adapt(model, adapter, job_of(adapter, precision))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            saved.append(saved_bytes(model.train(), torch, rows, length))
    measured = (saved[1] - saved[0]) / (rows * length)
    if precision == "bf16":  # autocast's copies of the weights are a term of their own
        frozen = four_bit_weights(facts, adapter) + narrow_weights(facts, adapter, 0)
        measured -= 2 * (facts.block_parameters - frozen // 2) / (rows * length)
    world = World(nodes=1, processes_per_node=1, device="cpu", threads_per_process=1)
    modelled = activation_bytes_per_token(
        work(facts, Strategy(name="single"), adapter=adapter, precision=precision, world=world, length=length)
    )
    assert 0.85 * measured <= modelled <= 1.35 * measured, f"modelled {modelled}, measured {measured:.0f}"


def saved_bytes(model: Any, torch: Any, rows: int, length: int) -> int:
    """Return the bytes of distinct storages that autograd keeps alive after one forward pass, without parameters and
    buffers.
    """
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}

    class Kept:
        """Tensor that the graph alone holds: DoRA computes norms whose graph is freed at once."""

        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept.setdefault(storage.data_ptr(), [storage.nbytes(), 0])[1] += 1

        def __del__(self) -> None:
            entry = kept.get(self.tensor.untyped_storage().data_ptr())
            if entry is not None:
                entry[1] -= 1
                if not entry[1]:
                    del kept[self.tensor.untyped_storage().data_ptr()]

    ids = torch.randint(2, 900, (rows, length))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(rows, dtype=torch.long)}
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda held: held.tensor):
        answer = model(**inputs)
    size = sum(nbytes for nbytes, _ in kept.values())
    assert answer.loss.requires_grad  # the graph lives until here
    return size
