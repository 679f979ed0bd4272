"""Linear layers in fp8: their selection, computation, assertions, and runs. torch multiplies in fp8 on a CPU as well,
with the roundings of GPUs: these tests use it, and jobs are refused.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune_contract.choices import Stage
from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import CheckpointSchedule, TrainerJob, World
from finetune_trainer.core.failures import StageError
from trainer_support.forking import fork_server
from trainer_support.tasks import (
    lines_with,
    losses,
    task_job,
    texts,
    train_here,
    trained,
    training_of,
    write_decoder,
    write_lines,
)

ON_GPU = World(nodes=1, processes_per_node=1, device="cuda", threads_per_process=1)

needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="torchao is not installed (finetune-trainer[fp8])"
)


def tiny(family: str, **config: Any) -> Any:
    """Return a classifier with random weights: 7 linear layers in each of 2 blocks of llama, 6 of bert."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    if family == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2}
    torch.manual_seed(3)
    whole = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, **sizes, **config}
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(family, **whole))


def run_stage(job: TrainerJob, paths: JobPaths, stage: Stage) -> None:
    from finetune_trainer.core.distributed import ProcessWorld
    from finetune_trainer.core.interruption import Interruption
    from finetune_trainer.core.progress import NoProgress
    from finetune_trainer.stage.stages import STAGES, StageInput

    STAGES[stage](StageInput(job, paths, NoProgress(), ProcessWorld(), None, Interruption()))


def loss_of(model: Any) -> Any:
    """Return the loss of rows whose tokens are no multiple of 16."""
    import torch

    ids = torch.randint(4, 40, (5, 7), generator=torch.Generator().manual_seed(1)).to(model.device)
    return model(input_ids=ids, labels=torch.tensor([0, 1, 0, 1, 1], device=model.device)).loss


def gradients(model: Any) -> dict[str, Any]:
    model.zero_grad()
    loss_of(model).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def products(work: Callable[[], Any]) -> Counter[str]:
    """Count the matrix products of `work`, by their names."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # An operation on torchao's tensors is dispatched again as the product of their inner ones.
            if any(kind.__name__ == "Float8TrainingTensor" for kind in types):
                return NotImplemented
            self.seen[func.name()] += 1
            return func(*args, **(kwargs or {}))

    with Watching() as watching:
        work()
    return Counter({name: count for name, count in watching.seen.items() if "mm" in name})


# --------------------------------------------------------------------------------------------------------- the layers


@needs_torchao
def test_all_three_products_of_a_layer_run_in_fp8_for_any_token_count():
    from finetune_trainer.models.float8 import convert

    model = tiny("llama")
    before = products(lambda: gradients(model))
    converted = convert(model)
    after = products(lambda: gradients(model))
    assert len(converted.layers) == 14
    assert after["aten::_scaled_mm"] == 3 * 14
    # The remaining product is the head's.
    assert before["aten::mm"] - after["aten::mm"] == 3 * 14
    assert "aten::_scaled_mm" not in before
    evaluated = products(lambda: loss_of(model.eval()))
    assert evaluated["aten::_scaled_mm"] == 14


@needs_torchao
def test_weights_and_their_names_are_unchanged():
    import torch

    from finetune_trainer.models.float8 import convert

    model = tiny("bert")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    convert(model)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@needs_torchao
def test_a_saved_model_answers_as_the_ordinary_one_does(tmp_path: Path):
    import torch
    from transformers import AutoModelForSequenceClassification

    from finetune_trainer.models.float8 import convert

    model = tiny("llama")
    ids = torch.arange(4, 24).reshape(2, 10)
    with torch.no_grad():
        before = model.eval()(input_ids=ids).logits
        convert(model)
        rounded = model.eval()(input_ids=ids).logits
        model.save_pretrained(tmp_path)
        saved = AutoModelForSequenceClassification.from_pretrained(tmp_path)
        assert torch.equal(saved.eval()(input_ids=ids).logits, before)
    assert not torch.equal(rounded, before)
    assert "fp8" not in (tmp_path / "config.json").read_text(encoding="utf-8")


KEPT = {
    "heads and poolers": (
        lambda: tiny("bert"),
        12,
        {"outside of the blocks": ("bert.pooler.dense", "classifier")},
    ),
    "keys and values of half a multiple of 16": (
        lambda: tiny("llama", num_attention_heads=8, num_key_value_heads=1),
        10,
        {
            "with a dimension that is not a multiple of 16": tuple(
                f"model.layers.{block}.self_attn.{which}_proj" for block in range(2) for which in "kv"
            ),
            "outside of the blocks": ("score",),
        },
    ),
}


@needs_torchao
@pytest.mark.parametrize("case", KEPT)
def test_unsuitable_layers_stay_in_bf16_and_are_logged_with_the_reason(case: str):
    import torch

    from finetune_trainer.models.float8 import convert

    made, count, left = KEPT[case]
    model = made()
    converted = convert(model)
    assert (len(converted.layers), converted.left) == (count, left)
    assert all(type(model.get_submodule(name)) is torch.nn.Linear for names in left.values() for name in names)
    total = count + sum(map(len, left.values()))
    exceptions = "".join(f"; except those {why} ({len(names)}, e.g. {names[0]})" for why, names in left.items())
    assert str(converted) == f"{count} of {total} linear layers multiply in fp8{exceptions}"


@needs_torchao
def test_routers_stay_and_a_layer_with_two_names_is_converted_under_both():
    import torch
    from torch.nn import Linear, ModuleDict, ModuleList

    from finetune_trainer.models.float8 import convert

    shared = Linear(32, 32)
    blocks = [ModuleDict({"shared": shared, "router": ModuleDict({"classifier": Linear(32, 16)})}) for _ in range(2)]
    blocks[1]["gate"] = Linear(32, 16)
    model = ModuleDict({"blocks": ModuleList(blocks)})
    converted = convert(model)
    assert converted.layers == ("blocks.0.shared", "blocks.1.shared")
    assert len(converted.left["that route to experts"]) == 3
    assert model["blocks"][0]["shared"].weight is model["blocks"][1]["shared"].weight
    converted.assert_in_effect(model)
    model["blocks"][1]["shared"] = torch.nn.Linear(32, 32)
    with pytest.raises(StageError, match=r"1 layers are in another precision than planned, e\.g\. .*blocks\.1"):
        converted.assert_in_effect(model)


@needs_torchao
@pytest.mark.parametrize(
    ("family", "sizes", "why"),
    [
        ("gpt2", {}, r"except those of type Conv1D \(8, "),
        ("bert", {"hidden_size": 40}, r"not a multiple of 16 \(12, "),
    ],
)
def test_a_model_of_which_nothing_would_be_in_fp8_is_refused(family: str, sizes: dict[str, int], why: str):
    from finetune_trainer.models.float8 import convert

    with pytest.raises(StageError, match=rf"fp8, and 0 of \d+ linear layers .*{why}") as error:
        convert(tiny(family, **sizes))
    assert (error.value.failure_class, error.value.reason) == (FailureClass.CONFIG, "NothingInFp8")


@needs_torchao
def test_prepare_refuses_it_before_a_gpu_is_taken(bench, tmp_path: Path):
    tiny("gpt2").save_pretrained(tmp_path / "model")
    tokenizer = bench.job.model.uri.removeprefix("file://")
    for file in Path(tokenizer).glob("*token*"):
        shutil.copy(file, tmp_path / "model")
    model = bench.job.model.model_copy(update={"uri": f"file://{tmp_path / 'model'}"})
    run = bench.at(tmp_path / "w").with_training(precision="fp8", world=ON_GPU)
    with pytest.raises(StageError, match="Conv1D") as error:
        run_stage(run.job.model_copy(update={"model": model}), run.paths, Stage.PREPARE)
    assert (error.value.failure_class, error.value.reason) == (FailureClass.CONFIG, "NothingInFp8")
    assert not (tmp_path / "w" / ".cache").exists()


def as_loaded(model: Any) -> None:
    import torch

    model.model.layers[1].mlp.up_proj = torch.nn.Linear(64, 96, bias=False)


def emulated(model: Any) -> None:
    from dataclasses import replace

    layer = model.model.layers[0].mlp.up_proj
    layer.config = replace(layer.config, emulate=True)


def kept_in_bf16(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.bfloat16()


@needs_torchao
@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (as_loaded, "1 layers are in another precision than planned"),
        (emulated, "model.layers.0.mlp.up_proj rounds as in"),
        (kept_in_bf16, r"the weight of model.layers.0.mlp.up_proj is stored in torch.bfloat16"),
    ],
)
def test_a_layer_that_does_not_multiply_in_fp8_fails_the_stage(spoil: Any, found: str):
    from finetune_trainer.models.float8 import convert

    model = tiny("llama")
    converted = convert(model)
    converted.assert_in_effect(model)
    spoil(model)
    with pytest.raises(StageError, match=found) as error:
        converted.assert_in_effect(model)
    assert error.value.failure_class is FailureClass.STRATEGY_NOT_IN_EFFECT


@needs_torchao
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_are_the_same_when_activations_are_recomputed(mode: Any):
    import torch

    from finetune_trainer.models.float8 import convert
    from finetune_trainer.training.passes.activations import checkpointing_arguments

    model = tiny("llama")
    convert(model)
    other = deepcopy(model)
    other.activation_checkpointing_enable(checkpointing_arguments(mode)["activation_checkpointing_kwargs"])
    mine, theirs = gradients(other.train()), gradients(model.train())
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    again = products(lambda: gradients(other))["aten::_scaled_mm"]
    assert again == (4 if mode == "full" else 3) * 14


@needs_torchao
def test_weights_are_not_taken_for_activations_when_these_are_offloaded():
    import torch

    from finetune_trainer.models.float8 import convert
    from finetune_trainer.training.passes.activations import InHostMemory

    model = tiny("llama", hidden_size=256)
    convert(model)
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    there, saved = InHostMemory(), []
    there.watch(model)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append((tensor.untyped_storage().data_ptr() in weights, there.is_activation(tensor)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model)
    assert (True, True) not in saved
    assert (True, False) in saved


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("device", "capability", "found"),
    [
        ("cpu", None, "a CPU has no fp8 units; GPUs have them from compute capability 8.9 on"),
        ("cuda", (8, 6), "NVIDIA A10G, of compute capability 8.6, has no fp8 units"),
        ("cuda", (8, 9), None),
        ("cuda", (9, 0), None),
    ],
)
def test_a_device_without_units_is_refused(device: Any, capability: Any, found: str | None, monkeypatch):
    import torch

    from finetune_trainer.models.float8 import refuse_without_units

    major, minor = capability or (0, 0)
    properties = SimpleNamespace(name="NVIDIA A10G", major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    if found is None:
        refuse_without_units(device)
        return
    with pytest.raises(StageError, match=found) as error:
        refuse_without_units(device)
    assert (error.value.failure_class, error.value.reason) == (FailureClass.CONFIG, "NoFp8Units")


@pytest.mark.parametrize(
    ("architecture", "found"),
    [("gfx90a:sramecc+:xnack-", "AMD Instinct, of architecture gfx90a:sramecc+:xnack-, has no"), ("gfx942", None)],
)
def test_amd_gpu_is_judged_by_its_architecture(architecture: str, found: str | None, monkeypatch):
    import torch

    from finetune_trainer.models.float8 import refuse_without_units

    monkeypatch.setattr(torch.version, "hip", "7.1")
    properties = SimpleNamespace(name="AMD Instinct", major=9, minor=0, gcnArchName=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    if found is None:
        refuse_without_units("cuda")
        return
    with pytest.raises(StageError, match=re.escape(found)):
        refuse_without_units("cuda")


def test_missing_torchao_is_reported_with_a_hint_before_a_gpu_is_used(bench, tmp_path: Path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    run = bench.at(tmp_path).with_training(precision="fp8", world=ON_GPU)
    for stage in (Stage.PREPARE, Stage.TRAIN):
        with pytest.raises(StageError) as error:
            run_stage(run.job, run.paths, stage)
        assert (error.value.failure_class, error.value.reason) == (FailureClass.CONFIG, "TorchaoMissing")
        assert "finetune-trainer[fp8]" in error.value.hint


@needs_torchao
@pytest.mark.parametrize(("precision", "importable"), [("bf16", False), ("fp8", True)])
def test_the_library_is_kept_out_of_runs_in_another_precision(precision: str, importable: bool, bench, monkeypatch):
    from finetune_trainer.core.unused_libraries import leave_out_unused

    for name in ("torchao", "bitsandbytes"):
        # The modules are restored when the test ends.
        monkeypatch.setitem(sys.modules, name, sys)
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    leave_out_unused(bench.with_training(precision=precision).job)
    assert (find_spec("torchao") is not None) == importable


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_only_a_job_in_fp8_imports_the_separate_packages_of_the_image(
    precision: str, bench, tmp_path: Path, monkeypatch
):
    from finetune_trainer.core.unused_libraries import leave_out_unused

    (tmp_path / "fp8").mkdir()
    (tmp_path / "fp8" / "kept_apart.py").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    leave_out_unused(bench.with_training(precision=precision).job)
    assert (find_spec("kept_apart") is not None) == (precision == "fp8")


# ---------------------------------------------------------------------------------------------------------------- runs

STEPS = {"max_steps": 24, "learning_rate": 1e-2, "warmup_steps": 1, "precision": "fp8"}


@needs_torchao
@pytest.mark.slow
def test_decoder_learns_in_fp8_as_in_bf16_and_saves_an_ordinary_model(tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM

    from finetune_trainer.core.progress import NoProgress
    from finetune_trainer.predict.evaluate import evaluate

    model = write_decoder(tmp_path / "decoder")
    for split, count in (("train", 160), ("validation", 32), ("test", 32)):
        write_lines(tmp_path / "data" / f"{split}.jsonl", texts(count, seed=count))
    curves, evaluated, folders = {}, {}, {}
    for precision in ("bf16", "fp8"):
        job = task_job(
            "text-generation",
            model,
            tmp_path / "data",
            ["text"],
            training=training_of(steps=30, precision=precision),
            preparation={"max_length": 32},
        )
        paths = JobPaths.of(tmp_path / precision, job.name)
        trained(job, paths, fp8_without_units=True)
        curves[precision], folders[precision] = losses(paths), paths.model
        evaluated[precision] = evaluate(job, paths, NoProgress())["evaluate"]["loss"]
    # E4M3 has 3 bits of fraction where bf16 has 7: factors are off by up to 6 percent, their sums by less. Measured
    # over losses from 3.1 down to 1.3: 0.002.
    assert curves["fp8"] == pytest.approx(curves["bf16"], abs=0.02)
    assert curves["fp8"] != pytest.approx(curves["bf16"], abs=1e-4)
    assert curves["fp8"][-1] < 0.7 * curves["fp8"][0]
    assert evaluated["fp8"] == pytest.approx(evaluated["bf16"], abs=0.02)
    saved = AutoModelForCausalLM.from_pretrained(folders["fp8"])
    assert {parameter.dtype for parameter in saved.parameters()} == {torch.float32}
    assert type(saved.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert getattr(saved.config, "quantization_config", None) is None


@needs_torchao
@pytest.mark.slow
def test_several_processes_learn_as_one_and_resume_with_ddp_and_fsdp(bench, tmp_path: Path):
    alone = bench.at(tmp_path / "single").with_training(**STEPS)
    train_here(alone.job, alone.paths, fp8_without_units=True)
    assert alone.losses()[-1] < 0.75 * alone.losses()[0]
    for strategy, bound in (("ddp", 0.005), ("fsdp", 0.02)):
        saving = CheckpointSchedule(every_steps=12, keep=1)
        run = bench.at(tmp_path / strategy).with_training(**STEPS, checkpoints=saving).spread(strategy, 2)
        case = run.case(processes=2)
        call = {"call": "process_support.fp8_on_cpu:train", "arguments": {"arguments": case["arguments"]}}
        codes, output = fork_server().run({**case, **call})
        assert codes == [0, 0], output
        assert (
            "12 of 14 linear layers multiply in fp8; except those outside of the blocks (2, e.g. bert.pooler.dense)"
            in output
        )
        # Each process takes scales from its own rows: measured 0.0002 over these steps. With fsdp, norms and the loss
        # are in bf16 as well, which autocast leaves in fp32, so losses are rounded to 0.004: 0.006.
        assert run.losses()[:12] == pytest.approx(alone.losses()[:12], abs=bound), strategy
        # Then the loss falls, at one rate, but a step sooner or later by the processor's rounding: at the end that is
        # 0.006 or 0.015 with ddp, 0.045 with fsdp, of a fall by 0.18.
        assert run.losses()[-1] < 0.9 * run.losses()[0], strategy
        assert run.weights().keys() == alone.weights().keys()
    # The shards that fsdp gathers in fp8 are saved in fp32, and a run goes on with them.
    whole = run.losses()
    shutil.rmtree(run.paths.checkpoints / "step-24")
    (run.paths.checkpoints / "latest").write_text("step-12\n", encoding="utf-8")
    codes, output = fork_server().run({**case, **call})
    assert codes == [0, 0], output
    assert run.losses()[-12:] == pytest.approx(whole[-12:], abs=0.005)


@needs_torchao
def test_it_runs_compiled_validates_and_goes_on_from_a_checkpoint(bench, tmp_path: Path):
    # This backend compiles nothing, so the test waits for no compiler.
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    saving = CheckpointSchedule(every_steps=2, keep=2)
    run = bench.at(tmp_path / "w").with_training(**{**STEPS, "max_steps": 4}, arguments=compiled, checkpoints=saving)
    train_here(run.job, run.paths, fp8_without_units=True)
    whole, weights = run.losses(), run.weights()
    assert whole[-1] < whole[0]
    assert lines_with(run.paths, "eval_loss")
    shutil.rmtree(run.paths.checkpoints / "step-4")
    (run.paths.checkpoints / "latest").write_text("step-2\n", encoding="utf-8")
    train_here(run.job, run.paths, fp8_without_units=True)
    assert run.losses()[-4:] == pytest.approx(whole)
    assert all((run.weights()[name] - weights[name]).abs().max() < 1e-6 for name in weights)


def gpu_with_units() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@needs_torchao
def test_a_gpu_has_about_the_gradients_of_bf16():
    import torch

    from finetune_trainer.models.float8 import convert

    if not gpu_with_units():
        pytest.skip("no GPU with units for fp8 (compute capability 8.9) is here")
    plain = tiny("llama").cuda()
    model = deepcopy(plain)
    convert(model)
    with torch.autocast("cuda", torch.bfloat16):
        mine, theirs = gradients(model), gradients(plain)
    largest = max(value.abs().max().item() for value in theirs.values())
    assert 0 < max((mine[name] - theirs[name]).abs().max().item() for name in theirs) < 0.1 * largest
