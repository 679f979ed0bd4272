"""LoRA, QLoRA and DoRA: trained and frozen weights, alike under every strategy, and the output of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import Adapter, CheckpointSchedule, EarlyStopping, TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.serving.request_rows import Form
from finetune_trainer.serving.serving_engine import ServingEngine
from trainer_support.no_checkpoints import to_the_last_step
from trainer_support.tasks import largest_difference, task_job, write_decoder

LORA = Adapter(method="lora", rank=4, alpha=16, dropout=0.0)
DORA = LORA.model_copy(update={"method": "dora"})
QLORA = LORA.model_copy(update={"method": "qlora"})
needs_four_bits = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed (finetune-trainer[qlora])"
)
METHODS = ["lora", pytest.param("qlora", marks=needs_four_bits), "dora"]
STEPS = {"max_steps": 8, "learning_rate": 2e-2, "warmup_steps": 1}
"""Few steps, at a rate at which their effect shows."""
SCHEDULE = CheckpointSchedule(every_steps=4, keep=2)


def adapted_bench(bench: Any, workspace: Path, adapter: Adapter = LORA, **training: Any) -> Any:
    return bench.at(workspace).with_training(**STEPS, adapter=adapter, checkpoints=SCHEDULE, **training)


def base_of(bench: Any) -> Any:
    """Return the initial model of the bench's job, with its head drawn from the job's seed."""
    from finetune_trainer.data.prepared import PreparedData
    from finetune_trainer.tasks.task_registry import task_parts

    return task_parts(bench.job.task).head.build_model(bench.job, PreparedData.open(bench.paths).facts)


def tensors(folder: Path, name: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / name)


def answers(model: Any) -> Any:
    """Return the logits of a few rows of different lengths."""
    import torch

    ids = torch.tensor([[2, 7, 9, 12, 3], [2, 20, 3, 0, 0]])
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=ids.ne(0).long()).logits


def adapted_again(bench: Any) -> Any:
    """Adapt the initial model as the bench's run does before the first step."""
    from finetune_trainer.models.adapters import adapt

    return adapt(base_of(bench), bench.job.training.adapter, bench.job)


def kept_weights(state: Path) -> set[str]:
    """Return the names of the weights in a checkpoint; in DeepSpeed's, of those beside its optimizer."""
    import torch

    index = state / "index.json"
    if index.exists():
        names = json.loads(index.read_text(encoding="utf-8"))["tensors"]
        return {name.removeprefix("weights/") for name in names if name.startswith("weights/")}
    first, *_ = sorted(state.glob("*/*model_states.pt"))
    return set(torch.load(first, weights_only=False)["module"])


def go_back(bench: Any, step: int) -> None:
    """Go back to the checkpoint of `step`, as if nothing had come after it."""
    for later in bench.paths.checkpoints.glob("step-*"):
        if int(later.name.removeprefix("step-")) > step:
            shutil.rmtree(later)
    shutil.rmtree(bench.paths.model)
    shutil.rmtree(bench.paths.adapter)


# ----------------------------------------------------------------------------------------------------------- strategies

CASES: dict[str, tuple[str, dict[str, int], Adapter]] = {
    "ddp": ("ddp", {}, LORA),
    "fsdp with DoRA, going on from one process": ("fsdp", {}, DORA),
    "ddp with QLoRA": ("ddp", {}, QLORA),
    "fsdp with QLoRA, and once more from the middle": ("fsdp", {}, QLORA),
    "ZeRO-2": ("deepspeed", {"zero_stage": 2}, LORA),
    "ZeRO-3, and once more from the middle": ("deepspeed", {"zero_stage": 3}, LORA),
}


@pytest.fixture(scope="module")
def alone(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return a function: method -> its run in one process."""

    @cache
    def run(method: str) -> Any:
        adapter = LORA.model_copy(update={"method": method})
        made = adapted_bench(bench, tmp_path_factory.mktemp("alone") / "w", adapter)
        made.train_here()
        return made

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=needs_four_bits if CASES[case][2] == QLORA else ()) for case in CASES]
)
def test_losses_and_weights_agree_with_one_process(case: str, alone, bench, tmp_path: Path, compared):
    strategy, settings, adapter = CASES[case]
    expected = alone(adapter.method)
    run = adapted_bench(bench, tmp_path / "w", adapter).spread(strategy, 2, **settings)
    config = run.deepspeed_config() if strategy == "deepspeed" else None
    if "going on" in case:
        shutil.copytree(expected.paths.checkpoints / "step-4", run.paths.checkpoints / "step-4")
        shutil.copy(expected.paths.history, run.paths.history)
    ended = run.run(processes=2, deepspeed=config)
    assert ended.exit_code == 0, ended.output
    assert ("Resuming from" in ended.output) == ("going on" in case)
    assert {"model": "model", "adapter": "adapter"}.items() <= ended.reports[0].artifacts.items()
    assert max(compared(run, expected)) <= 1e-5
    theirs, mine = (tensors(each.paths.adapter, "adapter_model.safetensors") for each in (expected, run))
    assert largest_difference(mine, theirs) <= 1e-5
    assert kept_weights(run.paths.checkpoints / "step-8" / "state") == adapted_again(run).trained
    if "once more" not in case:
        return

    whole = run.weights()
    go_back(run, 4)
    resumed = run.run(processes=2, deepspeed=config)
    assert resumed.exit_code == 0, resumed.output
    assert "Resuming from" in resumed.output
    assert largest_difference(run.weights(), whole) <= 1e-6


# ----------------------------------------------------------------------------------------------------- trained weights


def loop_over(bench: Any, model: Any, adapted: Any, folder: Path) -> Any:
    """Return the real loop in this process, without checkpoints, for a look at its model afterwards."""
    from finetune_trainer.core.progress import NoProgress
    from finetune_trainer.data.prepared import PreparedData
    from finetune_trainer.strategies.single import Single
    from finetune_trainer.tasks.task_registry import task_parts
    from finetune_trainer.training.loop import TrainingLoop
    from finetune_trainer.training.loop_parts import LoopData, LoopHooks, LoopModel
    from finetune_trainer.training.order import Collate, EpochOrder, TrainRows
    from finetune_trainer.training.run_observers import SilentObserver
    from finetune_trainer.training.training_arguments import training_arguments

    training, prepared, strategy = bench.job.training, PreparedData.open(bench.paths), Single("fp32")
    data = LoopData(
        EpochOrder(prepared.lengths("train"), training.batch, 0, training.seed, grouped=True),
        rows=TrainRows(prepared),
        collate=Collate(task_parts(bench.job.task).encoding, prepared.pad_token_id),
        validation=None,
    )
    hooks = LoopHooks(SilentObserver(NoProgress(), training.max_steps))
    arguments = training_arguments(training, folder, strategy.arguments())
    return TrainingLoop(arguments, LoopModel(model, strategy, adapted=adapted), data, to_the_last_step(), hooks)


def same(one: Any, other: Any) -> bool:
    """Return whether both are equal to the last bit: eight weights in 4 bits may read as NaN."""
    import torch

    return one.shape == other.shape and torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("method", METHODS)
def test_training_changes_adapter_and_head_and_no_base_weights(method: str, bench, tmp_path: Path):
    import torch

    from finetune_trainer.models.adapters import adapt

    adapter = LORA.model_copy(update={"method": method})
    run = adapted_bench(bench, tmp_path / "w", adapter)
    model = base_of(run)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    adapted = adapt(model, adapter, run.job)
    drawn = {name: value.clone() for name, value in model.state_dict().items()}
    loop_over(run, model, adapted, tmp_path / "out").train()

    after = model.state_dict()
    assert [name for name in drawn if name not in adapted.trained and not same(after[name], drawn[name])] == []
    frozen = {name.replace(".base_layer", "").replace(".original_module", ""): name for name in after}
    changed = [name for name in before if not same(after[frozen[name]], before[name])]
    assert changed == ([f"{name}.weight" for name in adapted.held] if method == "qlora" else [])
    assert len(adapted.layers) == 2 * 6
    still = [name for name in adapted.trained if torch.equal(after[name], drawn[name])]
    assert still == []


def test_adapter_without_effect_stops_the_run_before_its_first_step(bench, tmp_path: Path):
    from finetune_trainer.models.adapters import adapt

    run = adapted_bench(bench, tmp_path / "w")
    adapted = adapt(base_of(run), LORA, run.job)
    with pytest.raises(StageError, match="12 layers have no adapter") as error:
        loop_over(run, base_of(run), adapted, tmp_path / "out").train()
    assert (error.value.failure_class, error.value.reason) == (
        FailureClass.STRATEGY_NOT_IN_EFFECT,
        "AdapterNotInEffect",
    )


def switch_off(model: Any) -> None:
    model.bert.encoder.layer[1].output.dense.enable_adapters(enabled=False)


def merge(model: Any) -> None:
    model.bert.encoder.layer[1].output.dense.merge()


def freeze_the_head(model: Any) -> None:
    model.classifier.requires_grad_(False)


def train_an_embedding(model: Any) -> None:
    model.bert.embeddings.word_embeddings.requires_grad_(True)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(switch_off, "layer.1.output.dense is disabled", id="one that is switched off"),
        pytest.param(merge, "layer.1.output.dense is disabled", id="one that is merged already"),
        pytest.param(freeze_the_head, "2 weights are frozen or trained by mistake", id="a frozen head"),
        pytest.param(train_an_embedding, "e.g. ['bert.embeddings.word_embeddings.weight']", id="a trained base"),
    ],
)
def test_adapter_in_an_unexpected_state_is_refused(spoil, message: str, bench):
    from finetune_trainer.models.adapters import adapt

    model = base_of(bench)
    adapted = adapt(model, LORA, bench.job)
    adapted.assert_in_effect(model)
    spoil(model)
    with pytest.raises(StageError) as error:
        adapted.assert_in_effect(model)
    assert message in error.value.message


def test_lora_in_place_of_dora_is_refused(bench):
    from finetune_trainer.models.adapters import adapt

    plain, weight_decomposed = base_of(bench), base_of(bench)
    adapt(plain, LORA, bench.job)
    with pytest.raises(StageError, match="is lora"):
        adapt(weight_decomposed, DORA, bench.job).assert_in_effect(plain)


# ------------------------------------------------------------------------------------------------------- target modules

SHORT = {
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
}


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        pytest.param(None, SHORT, id="all of them"),
        pytest.param(("query", "value"), {"attention.self.query", "attention.self.value"}, id="two by their last word"),
        pytest.param(("output.dense",), {"attention.output.dense", "output.dense"}, id="an end that two names have"),
        pytest.param(("dense",), {n for n in SHORT if n.endswith("dense")}, id="the pooler's dense is the head's"),
    ],
)
def test_targets_match_as_in_peft(targets, adapted: set[str], bench):
    from finetune_trainer.models.adapters import adapt, block_linears

    model = base_of(bench)
    short = {each.name: each.short for each in block_linears(model)}
    adapter = LORA.model_copy(update={"target_modules": targets})
    made = adapt(model, adapter, bench.job)
    made.assert_in_effect(model)
    assert {short[name] for name in made.layers} == adapted
    assert len(made.layers) == 2 * len(adapted)


def test_targets_that_the_model_lacks_are_named_with_those_that_it_has(bench, tmp_path: Path):
    run = adapted_bench(bench, tmp_path / "w", LORA.model_copy(update={"target_modules": ("query", "q_proj", "dens")}))
    with pytest.raises(StageError) as error:
        run.train_here()
    assert (error.value.failure_class, error.value.reason) == (FailureClass.CONFIG, "UnknownTargetModules")
    assert error.value.message == (
        f"model.adapter.targetModules has 'q_proj', 'dens', and no linear layer in the blocks of {run.job.model.uri} "
        "has that name; there are attention.output.dense, attention.self.key, attention.self.query, "
        "attention.self.value, intermediate.dense, output.dense."
    )


# ------------------------------------------------------------------------------------------------------ output of a run


@pytest.mark.parametrize("method", METHODS)
def test_the_merged_model_answers_as_the_base_with_the_adapter_does(method: str, alone):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig

    run = alone(method)
    merged = AutoModelForSequenceClassification.from_pretrained(run.paths.model)
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=["bert.pooler", "classifier"],
    )
    how = {"quantization_config": four_bits} if method == "qlora" else {}
    base = AutoModelForSequenceClassification.from_pretrained(
        run.job.model.uri.removeprefix("file://"), num_labels=2, **how
    )
    for module in base.modules():
        # On a CPU with bf16 units bitsandbytes packs weights for them, which a tiny model's do not fill.
        module.support_avx512bf16_for_cpu = False
    plain = answers(base)
    together = PeftModel.from_pretrained(base, str(run.paths.adapter))
    assert (answers(merged) - answers(together)).abs().max().item() <= 1e-5
    assert (answers(merged) - plain).abs().max().item() > 1e-2
    assert type(merged).__name__ == "BertForSequenceClassification"
    assert AutoTokenizer.from_pretrained(run.paths.model)("lovely phone")["input_ids"]

    config = json.loads((run.paths.adapter / "adapter_config.json").read_text())
    wanted = ("peft_type", "task_type", "r", "lora_alpha", "use_dora", "base_model_name_or_path", "inference_mode")
    assert {name: config[name] for name in wanted} == {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS",
        "r": 4,
        "lora_alpha": 16.0,
        "use_dora": method == "dora",
        "base_model_name_or_path": str(Path(run.job.model.uri.removeprefix("file://")).resolve()),
        "inference_mode": True,
    }
    assert sorted(file.name for file in run.paths.adapter.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "finetune.json",
    ]
    card = (run.paths.model / "README.md").read_text()
    assert f"{ {'lora': 'LoRA', 'qlora': 'QLoRA', 'dora': 'DoRA'}[method] } adapter merged in" in card
    assert ("rounded to 4 bits" in card) == (method == "qlora")
    assert f"| Adapter | {method}, rank 4, alpha 16, dropout 0, on all linear layers of the blocks |" in card


@pytest.mark.parametrize("method", METHODS)
def test_served_adapter_answers_as_the_merged_model(method: str, alone, tmp_path: Path):
    run = alone(method)
    whole = {"name": "job", "task": run.job.task, "model": {"uri": f"file://{run.paths.model}"}}
    merged = ServingEngine.load(TrainerJob.model_validate(whole), JobPaths(tmp_path / "merged"))
    serving = {"adapters": [{"name": "tuned", "uri": f"file://{run.paths.adapter}"}]}
    serving |= {"model_name": "tiny", "device": "cpu", "max_batch_tokens": 512}
    body = {"name": "job", "task": run.job.task, "model": run.job.model.model_dump(), "serving": serving}
    job = TrainerJob.model_validate(body)
    if method == "qlora":
        with pytest.raises(StageError, match="rounded to 4 bits") as error:
            ServingEngine.load(job, JobPaths(tmp_path / "job"))
        assert error.value.reason == "AdapterRefused"
        return

    beside = ServingEngine.load(job, JobPaths(tmp_path / "job"))

    assert beside.names == ("tuned",)  # the base has no head
    rows = [{"text": "lovely phone"}, {"text": "the screen is bad and slow"}]
    found, wanted = (
        engine.answer(form, engine.encode(form, rows))
        for engine in (beside, merged)
        for form in [Form(("text",), engine.generation)]
    )
    assert [row["label"] for row in found] == [row["label"] for row in wanted]
    assert [row["scores"] for row in found] == [pytest.approx(row["scores"], abs=1e-5) for row in wanted]
    assert beside.answerer.labels == merged.answerer.labels


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "roberta": SIZES,
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48},
    "deberta-v2": {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "electra": {**SIZES, "embedding_size": 16},
    "modernbert": {**SIZES, "global_attn_every_n_layers": 1},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "llama": {**SIZES, "num_key_value_heads": 1},
    "t5": {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 2, "d_kv": 16},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_adapters_of_other_architectures_are_written_for_peft_and_merged(
    model_type: str, method: str, bench, tmp_path: Path
):
    import copy

    import torch
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from finetune_trainer.models.adapters import adapt, four_bits, write_adapter_and_merge

    tokens = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 0}
    config = AutoConfig.for_model(model_type, **tokens, **ARCHITECTURES[model_type])
    torch.manual_seed(1)
    base = AutoModelForSequenceClassification.from_config(config)
    adapted_model, reference = copy.deepcopy(base), copy.deepcopy(base)
    adapted = adapt(adapted_model, LORA.model_copy(update={"method": method}), bench.job)
    adapted.assert_in_effect(adapted_model)
    with torch.no_grad():
        for name, parameter in adapted_model.named_parameters():
            if name in adapted.trained:
                parameter += 0.1 * torch.randn_like(parameter)
    state = {name: value for name, value in adapted_model.state_dict().items() if name in adapted.trained}

    merged = write_adapter_and_merge(base, adapted, bench.job, state, tmp_path / "adapter")
    if method == "qlora":
        four_bits().round_weights(reference, adapted.held)
    together = PeftModel.from_pretrained(reference, str(tmp_path / "adapter"))
    expected = answers(adapted_model)
    assert (answers(merged) - expected).abs().max().item() <= 1e-5
    assert (answers(together) - expected).abs().max().item() <= 1e-5


@pytest.mark.parametrize("uri", ["file://base", "file://{}/base", "file://{}/link"])
def test_peft_loads_an_adapter_with_the_base_that_it_names(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The base is a local folder, and another folder is the current one when the adapter is loaded."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    from finetune_trainer.models.adapters import adapt, write_adapter_and_merge

    base = write_decoder(tmp_path / "base")
    (tmp_path / "link").symlink_to("base")
    monkeypatch.chdir(tmp_path)
    job = task_job("text-generation", uri.format(tmp_path), tmp_path, ["text"])
    adapted_model = AutoModelForCausalLM.from_pretrained(base)
    adapted = adapt(adapted_model, LORA, job)
    state = {
        name: torch.randn_like(value) for name, value in adapted_model.state_dict().items() if name in adapted.trained
    }
    merged = write_adapter_and_merge(
        AutoModelForCausalLM.from_pretrained(base), adapted, job, state, tmp_path / "adapter"
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    loaded = AutoPeftModelForCausalLM.from_pretrained("../adapter")

    assert loaded.peft_config["default"].base_model_name_or_path == str(base.resolve())
    assert (answers(loaded) - answers(merged)).abs().max().item() <= 1e-5
    assert (answers(loaded) - answers(AutoModelForCausalLM.from_pretrained(base))).abs().max().item() > 1e-2


@pytest.mark.parametrize("method", ["lora", pytest.param("qlora", marks=needs_four_bits)])
def test_a_run_goes_on_from_trained_weights_alone_and_refuses_another_base(
    method: str, tiny_bert, dropout_bench, tmp_path: Path
):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "base"
    shutil.copytree(dropout_bench.job.model.uri.removeprefix("file://"), folder)
    adapter = LORA.model_copy(update={"dropout": 0.2, "method": method})
    run = adapted_bench(dropout_bench, tmp_path / "w", adapter)
    source = run.job.model.model_copy(update={"uri": f"file://{folder}"})
    run = type(run)(run.workspace, run.job.model_copy(update={"model": source}))
    run.train_here()
    whole = run.weights()
    go_back(run, 4)
    assert kept_weights(run.paths.checkpoints / "step-4" / "state") == adapted_again(run).trained
    run.train_here()
    assert largest_difference(run.weights(), whole) <= 1e-6

    go_back(run, 4)
    weights = load_file(folder / "model.safetensors")
    weights["encoder.layer.1.output.dense.weight"] *= 1.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StageError, match="frozen_weights was") as error:
        run.train_here()
    assert error.value.reason == "CheckpointOfAnotherJob"


def test_adapter_is_merged_only_into_the_weights_of_its_training(bench, tmp_path: Path):
    from finetune_trainer.models.adapters import adapt, write_adapter_and_merge

    model, other = base_of(bench), base_of(bench)
    adapted = adapt(model, LORA, bench.job)
    other.bert.encoder.layer[0].attention.self.query.weight.data += 1
    with pytest.raises(StageError) as error:
        write_adapter_and_merge(other, adapted, bench.job, {}, tmp_path / "adapter")
    assert (error.value.failure_class, error.value.reason) == (FailureClass.MODEL, "BaseModelChanged")


def test_best_evaluation_is_kept_and_stale_adapter_is_deleted(bench, tmp_path: Path):
    import torch
    from safetensors.torch import load_file

    run = adapted_bench(bench, tmp_path / "w", early_stopping=EarlyStopping(patience=1))
    run.train_here()
    best = load_file(next((run.paths.checkpoints / "best").glob("step-*.safetensors")))
    name = "bert.encoder.layer.0.attention.self.query.lora_B"
    written = tensors(run.paths.adapter, "adapter_model.safetensors")
    assert torch.equal(written[f"base_model.model.{name}.weight"], best[f"{name}.default.weight"])
    assert all("lora_" in each or "modules_to_save" in each for each in best)

    shutil.rmtree(run.paths.checkpoints)
    run.with_training(adapter=None, early_stopping=None).train_here()
    assert not run.paths.adapter.exists()
    assert "adapter" not in (run.paths.model / "README.md").read_text()
