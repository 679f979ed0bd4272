"""The parts of tensor and pipeline parallelism that need no second process: where a model is cut, the order of ranks,
refusals, and the checks for being in effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune_contract.layout import FailureClass
from finetune_contract.plans import PIPELINE_FAMILIES, tensor_families
from finetune_contract.trainer_job import Pipeline, Strategy
from finetune_trainer.core.failures import StageError
from finetune_trainer.strategies.parallel.mesh import MeshShape
from finetune_trainer.strategies.parallel.model_layout import (
    balance,
    cost_of,
    cuts_of,
    keep_stages,
    layout_of,
    shell_of,
)
from finetune_trainer.strategies.parallel.model_parallel import ModelParallel, merged_groups
from finetune_trainer.strategies.parallel.tensor import split_weights, summed_weights, tensor_plan
from finetune_trainer.strategies.select import strategy_for
from finetune_trainer.strategies.strategy_protocol import tied_names

# ------------------------------------------------------------------------------------------------------------- balance


@pytest.mark.parametrize(
    ("layers", "stages", "ends", "cuts"),
    [
        pytest.param([1, 1, 1, 1], 2, {}, (0, 2, 4), id="equal layers are dealt out evenly"),
        pytest.param([1, 1, 1, 1, 1], 2, {}, (0, 2, 5), id="an odd one goes to either"),
        pytest.param([1, 1, 1, 1], 4, {}, (0, 1, 2, 3, 4), id="as many stages as layers"),
        pytest.param([4, 1, 1, 1, 1], 2, {}, (0, 1, 5), id="a dear layer is alone"),
        pytest.param([1, 1, 1, 1, 4], 2, {}, (0, 4, 5), id="wherever it is"),
        pytest.param([1] * 6, 2, {"after": 2}, (0, 4, 6), id="a dear head takes the place of layers"),
        pytest.param([1] * 6, 2, {"before": 2}, (0, 2, 6), id="and so does what comes before them"),
        pytest.param([1, 1, 1], 3, {"after": 100}, (0, 1, 2, 3), id="no stage is without a layer"),
        pytest.param([1, 1, 1], 1, {}, (0, 3), id="one stage has them all"),
    ],
)
def test_layers_are_dealt_out_by_cost(layers, stages, ends, cuts):
    assert balance(layers, stages, **ends) == cuts


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="2 layers cannot be divided among 3 stages"):
        balance([1, 1], 3)


@given(
    layers=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    stages=st.integers(1, 4),
    before=st.integers(0, 20),
    after=st.integers(0, 20),
)
def test_no_other_cuts_have_a_cheaper_dearest_stage(layers, stages, before, after):
    if len(layers) < stages:
        return

    def costs(cuts: tuple[int, ...]) -> list[float]:
        own = [float(sum(layers[start:end])) for start, end in pairwise(cuts)]
        own[0] += before
        own[-1] += after
        return own

    def rank(cuts: tuple[int, ...]) -> tuple[float, float]:
        return max(costs(cuts)), sum(cost * cost for cost in costs(cuts))

    everything = [(0, *inner, len(layers)) for inner in combinations(range(1, len(layers)), stages - 1)]
    found = balance(layers, stages, before=before, after=after)
    assert found in everything
    assert rank(found) == min(map(rank, everything))


# ---------------------------------------------------------------------------------------------------------------- mesh


@pytest.mark.parametrize(
    ("order", "neighbours"),
    [("DPT", ("tensor", "pipeline", "data")), ("PTD", ("data", "tensor", "pipeline")), ("TDP", ("pipeline", "data"))],
)
def test_neighbouring_ranks_differ_in_the_last_dimension_of_the_order(order, neighbours):
    shape, first = MeshShape(data=2, pipeline=2, tensor=2, order=order), {"data": 0, "pipeline": 0, "tensor": 0}
    assert shape.coordinates(0) == first | {"sequence": 0}
    for bit, name in enumerate(neighbours):
        assert shape.coordinates(1 << bit) == first | {"sequence": 0, name: 1}


@pytest.mark.parametrize("order", ["DPT", "DTP", "PDT", "PTD", "TDP", "TPD"])
def test_mesh_places_are_unique_and_replicas_read_different_rows(order):
    shape = MeshShape(data=3, pipeline=2, tensor=4, order=order)
    places = [shape.coordinates(rank) for rank in range(shape.size)]
    assert len({tuple(sorted(place.items())) for place in places}) == shape.size == 24
    assert {place["data"] for place in places} == {0, 1, 2}
    assert [shape.data_rank(rank) for rank in range(24)] == [place["data"] for place in places]


def test_without_model_parallelism_the_data_rank_is_the_rank():
    shape = MeshShape.of(Strategy(name="ddp"), 4)
    assert [shape.data_rank(rank) for rank in range(4)] == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------------------- cutting


def tiny(family: str, auto: str = "AutoModelForSequenceClassification", **config: Any) -> Any:
    import transformers

    shape = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape |= {"intermediate_size": 32, "max_position_embeddings": 40, "pad_token_id": 0, **config}
    shape |= {"bos_token_id": 1, "eos_token_id": 2} | ({"head_dim": 4} if family == "gemma" else {})
    torch.manual_seed(3)
    return getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(family, **shape)).eval()


ROWS = {
    "input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
}


def chained(model: Any, stages: int) -> Any:
    """Return the output of a model's stages, run one after the other."""
    layout = layout_of(model)
    cuts = cuts_of(model, layout, stages)
    shells = [shell_of(model, layout, start, end) for start, end in pairwise(cuts)]
    hidden = None
    for shell in shells[:-1]:
        if shell.received is not None:
            shell.received.hidden = hidden
        hidden = shell.body(**ROWS).last_hidden_state
    shells[-1].received.hidden = hidden  # type: ignore[union-attr]
    return shells[-1].model(**ROWS)


LAYOUTS = {
    "bert": ("bert", "AutoModelForSequenceClassification", "logits"),
    "bert that names tokens": ("bert", "AutoModelForTokenClassification", "logits"),
    "bert that answers questions": ("bert", "AutoModelForQuestionAnswering", "end_logits"),
    "bert that fills masks, with tied embeddings": ("bert", "AutoModelForMaskedLM", "logits"),
    "roberta": ("roberta", "AutoModelForSequenceClassification", "logits"),
    "xlm-roberta": ("xlm-roberta", "AutoModelForSequenceClassification", "logits"),
    "gpt2": ("gpt2", "AutoModelForSequenceClassification", "logits"),
    "gpt2 that writes, with tied embeddings": ("gpt2", "AutoModelForCausalLM", "logits"),
    "llama": ("llama", "AutoModelForSequenceClassification", "logits"),
    "llama that writes": ("llama", "AutoModelForCausalLM", "logits"),
    "mistral": ("mistral", "AutoModelForSequenceClassification", "logits"),
    "qwen2": ("qwen2", "AutoModelForSequenceClassification", "logits"),
    "gemma": ("gemma", "AutoModelForSequenceClassification", "logits"),
}


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_chained_stages_compute_the_output_of_the_whole_model(name: str, stages: int):
    family, auto, output = LAYOUTS[name]
    model = tiny(family, auto, **({"num_key_value_heads": 2} if family in ("gemma", "mistral", "qwen2") else {}))
    with torch.no_grad():
        assert torch.equal(getattr(chained(model, stages), output), getattr(model(**ROWS), output))


@pytest.mark.parametrize("family", PIPELINE_FAMILIES)
def test_families_that_auto_splits_have_a_known_layout_for_every_head(family: str):
    from transformers.models.auto import modeling_auto

    heads = {
        "AutoModelForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        "AutoModelForQuestionAnswering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
        "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    autos = [auto for auto, families in heads.items() if family in families]
    assert len(autos) >= 3
    for auto in autos:
        model = tiny(family, auto)
        assert len(cuts_of(model, layout_of(model), 2)) == 3, auto


@pytest.mark.parametrize(("family", "stages"), [("bert", 2), ("gpt2", 4), ("llama", 3)])
def test_parts_of_all_stages_add_up_to_the_model(family: str, stages: int):
    whole = {name: value.shape for name, value in tiny(family).state_dict().items()}
    kept: list[str] = []
    for stage in range(stages):
        model = tiny(family)
        layout = layout_of(model)
        cuts = cuts_of(model, layout, stages)
        keep_stages(model, layout, cuts, [stage])
        own = {name: value.shape for name, value in model.state_dict().items()}
        assert all(whole[name] == shape and layout.stage_of(name, cuts) == stage for name, shape in own.items())
        kept += own
    assert sorted(kept) == sorted(whole)


def test_a_head_that_is_computed_for_every_token_takes_the_place_of_layers():
    assert cost_of(torch.nn.Embedding(100, 8)) == 0
    narrow = tiny("llama", "AutoModelForCausalLM")
    wide = tiny("llama", "AutoModelForCausalLM", vocab_size=5000)
    assert cuts_of(narrow, layout_of(narrow), 2) == (0, 2, 4)
    assert cuts_of(wide, layout_of(wide), 2) == (0, 3, 4)


@pytest.mark.parametrize(
    ("family", "config"),
    [("distilbert", {}), ("deberta-v2", {"relative_attention": True}), ("albert", {}), ("electra", {})],
)
def test_model_without_a_known_layout_is_refused_with_the_known_ones(family: str, config: dict[str, Any]):
    with pytest.raises(StageError, match=r"cannot be cut into stages: .* BERT, GPT-2 or Llama") as refused:
        layout_of(tiny(family, **config))
    assert (refused.value.failure_class, refused.value.reason) == (FailureClass.CONFIG, "NoPipelineLayout")


def test_more_stages_than_the_model_has_layers_are_refused():
    model = tiny("bert")
    with pytest.raises(StageError, match="5 stages, and BertForSequenceClassification has 4 layers"):
        cuts_of(model, layout_of(model), 5)


# -------------------------------------------------------------------------------------------------------------- tensor


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_model_without_tensor_parallel_plan_is_refused(family: str):
    with pytest.raises(StageError) as refused:
        tensor_plan(tiny(family), 2)
    assert (refused.value.failure_class, refused.value.reason) == (FailureClass.CONFIG, "NoTensorPlan")
    assert f"no tensor-parallel plan for models of type {family}" in refused.value.message
    assert ", llama, " in refused.value.message
    assert family not in tensor_families()


def test_heads_that_the_degree_does_not_divide_are_refused():
    with pytest.raises(StageError, match=r"tensor is 4, which does not divide the 2 num_key_value_heads"):
        tensor_plan(tiny("llama", num_key_value_heads=2), 4)


def test_plan_names_split_weights_and_partial_gradients():
    plan = tensor_plan(tiny("qwen3", num_key_value_heads=2, head_dim=4), 2)
    assert "model.layers.3.self_attn.o_proj.weight" in split_weights(plan)
    norms = [f"model.layers.{layer}.self_attn.{which}_norm.weight" for layer in range(4) for which in "qk"]
    assert sorted(summed_weights(plan)) == sorted(norms)
    assert not set(summed_weights(plan)) & set(split_weights(plan))


@pytest.mark.parametrize("auto", ["AutoModelForSequenceClassification", "AutoModelForCausalLM"])
def test_of_gpt2_all_but_norms_positions_and_heads_is_split(auto: str):
    model = tiny("gpt2", auto)
    split = set(split_weights(tensor_plan(model, 2)))
    whole = {name for name, value in model.named_parameters() if value.ndim > 1} - split
    assert whole == {"transformer.wpe.weight"} | ({"score.weight"} if "Sequence" in auto else set())


def test_an_inner_width_of_gpt2_that_the_degree_does_not_divide_is_refused():
    with pytest.raises(StageError, match="tensor is 4, which does not divide the 30 n_inner of the model"):
        tensor_plan(tiny("gpt2", n_inner=30), 4)


def test_second_names_of_shared_weights_are_found():
    assert tied_names(tiny("gpt2", "AutoModelForCausalLM")) == {"lm_head.weight": "transformer.wte.weight"}
    assert tied_names(tiny("llama")) == {}


# --------------------------------------------------------------------------------------------------------------- state


def test_groups_of_all_processes_become_one_list_without_second_names():
    decayed, plain = {"lr": 0.1, "weight_decay": 0.01}, {"lr": 0.1, "weight_decay": 0.0}
    first = [{**decayed, "params": ["a", "b"]}, {**plain, "params": ["n"]}]
    second = [{**decayed, "params": ["a"]}, {**decayed, "params": ["head"]}, {**plain, "params": ["m"]}]
    assert merged_groups([first, second, first], {"head": "a"}) == [
        {**decayed, "params": ["a", "b"]},
        {**plain, "params": ["n", "m"]},
    ]


# ------------------------------------------------------------------------------------------------------------- refusals


def test_micro_batches_that_do_not_fill_whole_passes_are_refused(bench):
    run = bench.spread("ddp", 1, micro=4).with_training(
        strategy=Strategy(name="ddp", pipeline=Pipeline(degree=2, micro_batches=3))
    )
    with pytest.raises(StageError, match="a step has 4 micro-batches, not a multiple of it"):
        strategy_for(run.job.training, None, run.paths.offload)


# ------------------------------------------------------------------------------------------------------------ in effect


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Make this process rank 0 of a group of two whose messages go nowhere."""
    yield from first_of(2)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """Make this process rank 0 of a group of four whose messages go nowhere."""
    yield from first_of(4)


def first_of(size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    yield
    torch.distributed.destroy_process_group()


def placed(model: Any, wrapped: Any = None, optimized: Any = None, world: int = 2) -> Any:
    from finetune_trainer.strategies.strategy_protocol import Placed

    optimizer = torch.optim.SGD((optimized or model).parameters())
    return Placed(model, wrapped or model, optimizer, world, torch.device("cpu"))


def refusal(strategy: Any, found: Any) -> str:
    with pytest.raises(StageError) as error:
        strategy.assert_in_effect(found)
    assert error.value.failure_class is FailureClass.STRATEGY_NOT_IN_EFFECT
    return error.value.reason


def strategy_of(bench: Any, **settings: Any) -> ModelParallel:
    run = bench.spread("ddp", 1, micro=4).with_training(strategy=Strategy(name="ddp", **settings))
    return ModelParallel(run.job.training)


def sharded_replicas(bench: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """Return FSDP over two replicas of split layers, which do not compare answers."""
    chosen = Strategy(name="fsdp", **{"tensor": 2, **settings})
    strategy = strategy_for(bench.in_replicas(chosen, 2, 4).job.training, None, bench.paths.offload)
    monkeypatch.setattr(strategy, "_expect_same_answers", lambda model, expected: None)
    return strategy


def test_tensor_parallelism_that_is_not_there_is_an_error(two_ranks, bench, monkeypatch):
    strategy = strategy_of(bench, tensor=2)
    monkeypatch.setattr(strategy, "_expect_same_answers", lambda model, expected: None)
    model = strategy.prepare_model(tiny("llama"))
    strategy.assert_in_effect(placed(model))
    assert refusal(strategy, placed(model, wrapped=torch.nn.Sequential(model))) == "ModelIsWrapped"
    assert refusal(strategy, placed(model, world=4)) == "WrongMesh"
    assert refusal(strategy, placed(model, optimized=model.score)) == "NotOptimized"
    # Whole weights, as left by a library that accepts the plan and does nothing.
    assert refusal(strategy, placed(tiny("llama"))) == "ParameterNotSharded"


def test_fsdp_over_split_layers_that_is_not_there_is_an_error(four_ranks, bench, monkeypatch):
    strategy = sharded_replicas(bench, monkeypatch)
    model = strategy.prepare_model(tiny("llama"))
    strategy.assert_in_effect(placed(model, world=4))
    assert refusal(strategy, placed(model, world=2)) == "WrongMesh"
    assert refusal(strategy, placed(model, optimized=model.score, world=4)) == "NotOptimized"

    keeping = sharded_replicas(bench, monkeypatch, fsdp_sharding="grad-op")
    keeping._mesh, keeping._plan = strategy._mesh, strategy._plan
    assert refusal(keeping, placed(model, world=4)) == "WrongSharding"

    # Layers that are split, with the whole state of their part on each replica.
    replicated = bench.in_replicas(Strategy(name="ddp", tensor=2), 2, 4)
    split = ModelParallel(replicated.job.training)
    monkeypatch.setattr(split, "_expect_same_answers", lambda model, expected: None)
    assert refusal(strategy, placed(split.prepare_model(tiny("llama")), world=4)) == "ParameterNotSharded"


def test_fsdp_over_stages_that_gather_for_each_micro_batch_is_an_error(four_ranks, bench, monkeypatch):
    monkeypatch.setattr("finetune_trainer.strategies.parallel.model_parallel._probe", lambda model: {})
    strategy = sharded_replicas(bench, monkeypatch, tensor=1, pipeline=Pipeline(degree=2, micro_batches=2))
    # No process counts the parameters of the other stage here.
    monkeypatch.setattr(strategy, "_assert_in_stages", lambda held: None)
    model = strategy.prepare_model(tiny("llama"))
    strategy.assert_in_effect(placed(model, world=4))
    model.model.layers[0].set_reshard_after_forward(True)
    assert refusal(strategy, placed(model, world=4)) == "WrongSharding"


def test_fsdp_divides_the_slices_of_split_layers_among_replicas(four_ranks, bench, monkeypatch):
    model = sharded_replicas(bench, monkeypatch).prepare_model(tiny("llama", vocab_size=52))
    whole = tiny("llama", vocab_size=52)
    shares = {
        name: whole.get_parameter(name).numel() / value.to_local().numel() for name, value in model.named_parameters()
    }
    assert shares["model.layers.0.self_attn.q_proj.weight"] == shares["model.embed_tokens.weight"] == 4
    assert shares["model.layers.0.mlp.down_proj.weight"] == 4
    assert shares["model.layers.0.input_layernorm.weight"] == shares["score.weight"] == 2


def test_an_answer_that_changes_when_the_model_is_spread_is_an_error(two_ranks, bench):
    # No process sums the parts here.
    with pytest.raises(StageError) as error:
        strategy_of(bench, tensor=2).prepare_model(tiny("llama"))
    assert (error.value.failure_class, error.value.reason) == (FailureClass.STRATEGY_NOT_IN_EFFECT, "OtherAnswers")


def test_body_that_does_more_to_embeddings_than_its_layout_is_detected():
    model = tiny("granite", "AutoModelForCausalLM", embedding_multiplier=3.0)
    with torch.no_grad():
        assert not torch.allclose(chained(model, 2).logits, model(**ROWS).logits)


def test_a_process_that_keeps_the_whole_model_is_no_stage(two_ranks, bench, monkeypatch):
    strategy = strategy_of(bench, pipeline=Pipeline(degree=2, micro_batches=4))
    monkeypatch.setattr(strategy, "_expect_same_answers", lambda model, expected: None)
    monkeypatch.setattr("finetune_trainer.strategies.parallel.pipeline.keep_stages", lambda *parts: None)
    monkeypatch.setattr("finetune_trainer.strategies.parallel.model_parallel._probe", lambda model: {})
    model = strategy.prepare_model(tiny("bert"))
    assert refusal(strategy, placed(model)) == "NotInStages"


def test_the_list_of_families_is_in_the_package():
    assert {"llama", "mistral", "qwen2", "qwen3", "gemma", "gpt_neox", "gpt2"} <= set(tensor_families())
    assert list(tensor_families()) == sorted(tensor_families())
