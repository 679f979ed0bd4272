"""Examples whose models write, answer questions or span many GPUs run to their end on this machine: `finetune run` of
the printed file, with another model, rows, GPUs, degrees and length of the run.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples import FITTED_LOCALLY, example_document
from finetune_contract.layout import JobPaths
from suite_plugins.patience import patient
from trainer_support.families import write_family
from trainer_support.forking import start_server
from trainer_support.tasks import WORDS, predictions, write_lines

TEXT = " ".join(WORDS[:10])
LAYERS = {"gpt2-30b": 2, "gpt2-175b": 2, "mnli-pipeline": 4}
"""Layers of the small model, where the example's pipeline has as many stages or more."""
CHAT = {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sees ."}]}
ROWS: dict[str, dict[str, Any]] = {
    "chat-lora": CHAT,
    "chat-qlora": CHAT,
    "domain-words": {"text": TEXT},
    "gpt2-175b": {"text": TEXT},
    "gpt2-30b": {"text": TEXT},
    "gpt2-30b-sharded": {"text": TEXT},
    "long-texts": {"text": TEXT},
    "mnli-pipeline": {"premise": TEXT, "hypothesis": "the cat", "label": 0},
    "preferences": {
        "prompt": [{"role": "user", "content": "the cat"}],
        "chosen": [{"role": "assistant", "content": "sees ."}],
        "rejected": [{"role": "assistant", "content": "hears the dog ."}],
    },
    "squad-data-parallel": {
        "question": "the cat",
        "context": TEXT,
        "answers": {"text": ["dog"], "answer_start": [TEXT.index("dog")]},
    },
    "summaries": {"dialogue": TEXT, "summary": "the cat"},
}
ALSO_HERE: dict[str, dict[str, Any]] = {
    "longformer-tokens": {"tokens": WORDS[:6], "tags": ["O", "B-X", "I-X", "O", "O", "B-X"]},
    "rotten-tomatoes-deepspeed-mpi": {"text": TEXT, "label": 0},
    "rotten-tomatoes-fsdp-pytorchjob": {"text": TEXT, "label": 0},
}
"""Examples that run in a cluster as well."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models, each of its example's family, with a tokenizer of its kind."""
    folder = tmp_path_factory.mktemp("models")
    roberta = write_family(folder / "roberta", "roberta", num_hidden_layers=LAYERS["mnli-pipeline"])
    return {
        **dict.fromkeys(("chat-lora", "chat-qlora", "preferences"), write_family(folder / "qwen2.5", "qwen2.5")),
        **dict.fromkeys(("domain-words", "mnli-pipeline"), roberta),
        **dict.fromkeys(("gpt2-175b", "gpt2-30b", "gpt2-30b-sharded"), write_family(folder / "gpt2", "gpt2")),
        "long-texts": write_family(folder / "qwen3", "qwen3"),
        "longformer-tokens": write_family(folder / "longformer", "longformer"),
        "rotten-tomatoes-deepspeed-mpi": write_family(folder / "deberta-v3", "deberta-v3"),
        "rotten-tomatoes-fsdp-pytorchjob": roberta,
        "squad-data-parallel": write_family(folder / "bert", "bert"),
        "summaries": write_family(folder / "t5", "t5"),
    }


@pytest.fixture(scope="module")
def finetune() -> list[str]:
    return start_server().finetune


def fitted(name: str) -> dict[str, Any]:
    """Return the example's parallelism, with degrees for a model of few layers and heads."""
    parallelism: dict[str, Any] = example_document(name)["spec"].get("parallelism", {})
    parallelism |= dict.fromkeys({"tensor", "sequence"} & parallelism.keys(), 2)
    if "pipeline" in parallelism:
        degree = min(parallelism["pipeline"]["degree"], LAYERS[name])
        parallelism["pipeline"] = {**parallelism["pipeline"], "degree": degree, "microBatches": "auto"}
    return parallelism


def processes(parallelism: dict[str, Any]) -> int:
    """Return the number of processes that one machine runs it with."""
    spread = parallelism.get("tensor", 1) * parallelism.get("pipeline", {}).get("degree", 1)
    spread *= parallelism.get("sequence", 1)
    return spread if spread > 1 else 2 if parallelism.get("strategy") in ("ddp", "deepspeed", "fsdp") else 1


def ran(finetune: Sequence[str], name: str, model: Path, folder: Path) -> JobPaths:
    row = {**ROWS, **ALSO_HERE}[name]
    rows = [{**row, "label": at % 3} if "label" in row else row for at in range(24)]
    for split in ("train", "validation", "test"):
        write_lines(folder / "rows" / f"{split}.jsonl", rows)
    document = example_document(name)
    spec = document["spec"]
    spec["model"]["uri"] = f"file://{model}"
    spec["dataset"]["uri"] = f"file://{folder}/rows"
    if spec["dataset"].pop("config", None) is not None:
        del spec["dataset"]["splits"]
    if "dataset" in spec.get("predict", {}):
        del spec["predict"]["dataset"]
    if gate := (spec.get("evaluation") or {}).get("gate"):
        gate["minimum"] = 0.0
    spec["preparation"] |= {"maxLength": 32} | ({"stride": 8} if "stride" in spec["preparation"] else {})
    spec["training"] = {**spec["training"], "maxSteps": 2, "globalBatchSize": 4}
    spec["training"].pop("epochs", None)
    spec["parallelism"] = fitted(name)
    if "pipeline" in spec["parallelism"]:
        spec["training"].pop("microBatchSize", None)  # planned for a large batch
    spec["resources"] = {}
    if "generation" in spec:
        spec["generation"]["maxNewTokens"] = 6
    (folder / "job.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    command = [*finetune, "run", str(folder / "job.yaml"), "--workspace", str(folder / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(1500), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return JobPaths.of(folder / "runs", name)


def test_these_are_all_of_them() -> None:
    assert set(ROWS) == set(FITTED_LOCALLY)


@pytest.mark.slow
@pytest.mark.parametrize("name", FITTED_LOCALLY)
def test_example_trains_evaluates_and_predicts(name, models, tmp_path, finetune):
    spec = example_document(name)["spec"]
    if spec["model"].get("adapter", {}).get("method") == "qlora":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (finetune-trainer[qlora])")
    paths = ran(finetune, name, models[name], tmp_path)
    metrics = json.loads(paths.metrics.read_text(encoding="utf-8"))
    metric_names = (spec.get("evaluation") or {}).get("metrics")
    assert set(metric_names or ["perplexity", "accuracy"]) <= set(metrics["evaluate"])
    strategy = spec.get("parallelism", {}).get("strategy", "ddp" if name in LAYERS else "single")
    assert metrics["train"]["strategy"].startswith(strategy)
    assert [part in metrics["train"]["strategy"] for part in ("tensor2", "pipeline", "sequence2")] == [
        "tensor" in spec.get("parallelism", {}),
        name in LAYERS,
        "sequence" in spec.get("parallelism", {}),
    ]
    assert metrics["train"]["world_size"] == processes(fitted(name))
    if "predict" in spec:
        rows = predictions(paths)
        assert len(rows) == 24
        assert all({"generated_text", *spec["predict"]["columns"]} <= set(row) for row in rows)
    assert (paths.root / "adapter").exists() == ("adapter" in spec["model"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ALSO_HERE)
def test_an_example_of_a_cluster_runs_here_with_a_model_of_its_own_family(name, models, tmp_path, finetune):
    spec = example_document(name)["spec"]
    paths = ran(finetune, name, models[name], tmp_path)
    metrics = json.loads(paths.metrics.read_text(encoding="utf-8"))
    assert metrics["train"]["strategy"].startswith(spec["parallelism"]["strategy"])
    assert metrics["train"]["world_size"] == 2
    assert metrics["evaluate"]["loss"] > 0
    if "predict" in spec:
        assert len(predictions(paths)) == 24
    config = json.loads((paths.model / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == json.loads((models[name] / "config.json").read_text(encoding="utf-8"))["model_type"]
