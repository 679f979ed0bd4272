"""A model is loaded in the types of its files, and trained as if it had been converted to fp32 at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, PreTrainedModel

from finetune_contract.trainer_job import Adapter
from finetune_trainer.models.stored_weights import as_stored, in_training_type, narrow_weights
from finetune_trainer.training import run as training_run
from trainer_support.families import FAMILIES, write_family

HALF = torch.bfloat16


def stored_in(folder: Path, dtype: torch.dtype) -> Path:
    """Write the weights of a model again in `dtype`, all rounded to bf16 first, so that both types hold the same."""
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        save_file({name: value.to(HALF).to(dtype) for name, value in weights.items()}, file, {"format": "pt"})
    return folder


def built(folder: Path) -> Any:
    torch.manual_seed(3)
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, num_labels=3)


SEVERAL_CLASSES = ("bert", "llama3", "t5", "deberta-v3", "gemma")


@pytest.mark.parametrize("name", SEVERAL_CLASSES)
def test_weights_keep_the_types_of_files_and_new_ones_are_fp32(name: str, tmp_path: Path) -> None:
    folder = stored_in(write_family(tmp_path / name, name), HALF)
    expected, found = built(folder), as_stored(lambda: built(folder))
    stored = torch.float16 if FAMILIES[name].halves else HALF
    types = {weight.dtype for weight in found.parameters()}
    assert types == {stored, torch.float32}, "those of files, and those of the new head"
    in_training_type(found.parameters())
    theirs = expected.state_dict()
    assert found.state_dict().keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in found.state_dict().items())
    buffers = dict(expected.named_buffers())
    assert all(torch.equal(value, buffers[key]) for key, value in found.named_buffers())


def test_experts_that_are_merged_while_loading_keep_the_types_of_files(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    MixtralForCausalLM(config).to(HALF).save_pretrained(tmp_path)
    found = as_stored(lambda: AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    assert {weight.dtype for weight in found.parameters()} == {HALF}
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    in_training_type(found.parameters())
    assert all(
        torch.equal(mine, theirs) for mine, theirs in zip(found.parameters(), expected.parameters(), strict=True)
    )


class OfManyTypes(PreTrainedModel):
    """A model with buffers of several types."""

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("places", torch.arange(4))
        self.register_buffer("mean", torch.rand(4))
        self.register_buffer("angles", torch.rand(4, dtype=torch.float64))
        self.register_buffer("constants", torch.ones(4, dtype=torch.float64), persistent=False)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        pass


def test_whole_numbers_and_buffers_get_the_types_of_the_model(tmp_path: Path) -> None:
    OfManyTypes(LlamaConfig()).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = {"linear.weight": torch.int8, "linear.bias": torch.float64, "places": torch.float32, "mean": HALF}
    weights = load_file(file)
    save_file({name: value.to(stored.get(name)) for name, value in weights.items()}, file, {"format": "pt"})

    def load() -> OfManyTypes:
        return OfManyTypes.from_pretrained(tmp_path, dtype=torch.float32)

    expected, found = load(), as_stored(load)
    in_training_type(found.parameters())
    for mine, theirs in (
        (dict(found.named_parameters()), dict(expected.named_parameters())),
        (dict(found.named_buffers()), dict(expected.named_buffers())),
    ):
        assert {name: (each.dtype, each.requires_grad) for name, each in mine.items()} == {
            name: (each.dtype, each.requires_grad) for name, each in theirs.items()
        }
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items() if name != "constants")


def test_another_load_converts_as_before(tmp_path: Path) -> None:
    folder = stored_in(write_family(tmp_path / "bert", "bert"), HALF)
    as_stored(lambda: built(folder))
    assert {weight.dtype for weight in built(folder).parameters()} == {torch.float32}


def test_only_frozen_linear_weights_are_in_the_computed_type() -> None:
    tied = torch.nn.Embedding(6, 4)
    head = torch.nn.Linear(4, 6, bias=False)
    head.weight = tied.weight
    frozen, trained, norm = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)
    model = torch.nn.Sequential(tied, head, frozen, trained, norm).requires_grad_(requires_grad=False)
    trained.requires_grad_(requires_grad=True)
    assert narrow_weights(model, "bf16") == {id(frozen.weight): HALF}
    assert narrow_weights(model, "fp16") == {id(frozen.weight): torch.float16}
    assert narrow_weights(model, "fp32") == narrow_weights(model, "fp8") == {}
    in_training_type(model.parameters(), narrow_weights(model, "bf16"))
    assert {name for name, each in model.named_parameters() if each.dtype == HALF} == {"2.weight"}


# ------------------------------------------------------------------------------------------------------------ training


LORA = Adapter(method="lora", rank=4, alpha=16, dropout=0.0)
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "single": ("single", {}, {}),
    "fsdp in bf16": ("fsdp", {}, {"precision": "bf16"}),
    "fsdp in host memory": ("fsdp", {"offload_parameters": "cpu", "offload_optimizer": "cpu"}, {}),
    "ZeRO-2": ("deepspeed", {"zero_stage": 2}, {}),
    "ZeRO-3 in bf16": ("deepspeed", {"zero_stage": 3}, {"precision": "bf16"}),
    "single with LoRA": ("single", {}, {"precision": "bf16", "adapter": LORA}),
    "ddp with LoRA": ("ddp", {}, {"precision": "bf16", "adapter": LORA}),
    "fsdp with LoRA": ("fsdp", {}, {"precision": "bf16", "adapter": LORA}),
    "fsdp with DoRA": ("fsdp", {}, {"precision": "bf16", "adapter": LORA.model_copy(update={"method": "dora"})}),
}


@pytest.fixture(scope="module")
def two_forms(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, Path]:
    """One model, stored in bf16 and in fp32."""
    folder = tmp_path_factory.mktemp("forms")
    found = []
    for dtype in (HALF, torch.float32):
        copy = folder / str(dtype)
        copy.mkdir()
        for file in tiny_model.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        found.append(stored_in(copy, dtype))
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_trainings_from_both_types_are_the_same(
    way: str, two_forms: tuple[Path, Path], bench_of: Callable[[Path, Path, Path], Any], tiny_data: Path, tmp_path: Path
) -> None:
    strategy, settings, changes = WAYS[way]
    processes = 1 if strategy == "single" else 2
    losses = []
    for number, model in enumerate(two_forms):
        run = bench_of(tmp_path / str(number), model, tiny_data).spread(strategy, processes, **settings)
        run = run.with_training(max_steps=4, learning_rate=1e-2, **changes)
        ended = run.run(processes=processes, deepspeed=run.deepspeed_config() if strategy == "deepspeed" else None)
        assert ended.exit_code == 0, ended.output
        engine_writes = strategy == "deepspeed" and "precision" in changes
        assert {weight.dtype for weight in run.weights().values()} == {HALF if engine_writes else torch.float32}
        losses.append(run.losses())
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("method", "form"), [("lora", 0), ("lora", 1), ("dora", 0)])
def test_frozen_layers_of_an_adapted_model_are_held_in_bf16(
    method: str,
    form: int,
    two_forms: tuple[Path, Path],
    bench_of: Callable[[Path, Path, Path], Any],
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, torch.dtype] = {}
    train = training_run._train

    def noted(loop: Any, **how: Any) -> None:
        seen.update({name: weight.dtype for name, weight in loop.engine.model.named_parameters()})
        train(loop, **how)

    monkeypatch.setattr(training_run, "_train", noted)
    run = bench_of(tmp_path, two_forms[form], tiny_data)
    adapter = LORA.model_copy(update={"method": method})
    run.with_training(max_steps=1, precision="bf16", adapter=adapter).train_here()
    narrow = {name for name, dtype in seen.items() if dtype == HALF}
    # DoRA takes the norms of its layers' weights, which would be rounded.
    ends = (
        "original_module.weight",
        "original_module.dense.weight",
        *(["base_layer.weight"] if method == "lora" else []),
    )
    assert narrow == {name for name in seen if name.endswith(ends)}
    assert len(narrow) == (14 if method == "lora" else 2)
    assert set(seen.values()) <= {HALF, torch.float32}


def test_training_in_mapped_weights_does_not_write_to_their_file(
    two_forms: tuple[Path, Path], bench_of: Callable[[Path, Path, Path], Any], tiny_data: Path, tmp_path: Path
) -> None:
    (file,) = two_forms[1].glob("*.safetensors")
    before, weights = file.read_bytes(), load_file(file)
    run = bench_of(tmp_path, two_forms[1], tiny_data)
    run.with_training(max_steps=3, learning_rate=1e-2).train_here()
    trained = run.weights()
    changed = [name for name, weight in weights.items() if not torch.equal(trained[f"bert.{name}"], weight)]
    assert len(changed) > len(weights) / 2
    assert file.read_bytes() == before


# -------------------------------------------------------------------------------------------------------------- memory


PROGRAM = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
from finetune_contract.trainer_job import Adapter
from finetune_trainer.models.stored_weights import as_stored

def private():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Dirty", "Swap:")))

build = lambda: AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
build().get_parameter("model.norm.weight")  # imports and caches
before = private()
model = as_stored(build) if sys.argv[2] == "stored" else build()
grown = private() - before
print(json.dumps([grown, sum(each.numel() for each in model.parameters())]))
"""


@pytest.mark.slow
def test_a_loaded_model_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8
    )
    LlamaForCausalLM(config).to(HALF).save_pretrained(tmp_path)
    grown = {}
    for form in ("stored", "converted"):
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path), form], capture_output=True, text=True, check=True
        )
        grown[form], parameters = json.loads(run.stdout.splitlines()[-1])
    assert parameters > 80e6
    assert grown["converted"] > 3.5 * parameters
    assert grown["stored"] < 0.2 * parameters
