"""The backend `continuous-batching`: texts equal those of `generate` for each row alone, in fewer passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.predict.backends import backend_in_use, choosing
from finetune_trainer.predict.backends.backend_protocol import Machine, TextSettings
from finetune_trainer.predict.backends.backend_table import BackendTable
from finetune_trainer.predict.backends.continuous_batches import ContinuousBatchingBackend, SlotGenerator
from finetune_trainer.predict.predict import predict
from finetune_trainer.report.reporting import write_report
from trainer_support.tasks import WORDS, read_lines, write_decoder, write_lines

PAD, MOST = 0, 24
SETTINGS = TextSettings(max_new_tokens=MOST, num_beams=1, temperature=0.0, batch_tokens=256)
PROMPTS = [" ".join(WORDS[(at * 5 + step * 3) % len(WORDS)] for step in range(1 + at % 9)) for at in range(30)]


def decoder(folder: Path, family: str = "llama", **config: Any) -> PreTrainedModel:
    """Return a random decoder whose tokens differ from each other."""
    scale = {} if family == "gpt2" else {"initializer_range": 0.5}
    return AutoModelForCausalLM.from_pretrained(write_decoder(folder, family, **scale, **config)).eval()


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def prompts_of(rows: int, vocabulary: int) -> list[list[int]]:
    draw = np.random.default_rng(1)
    return [draw.integers(4, vocabulary, draw.integers(1, 12)).tolist() for _ in range(rows)]


def alone(model: PreTrainedModel, prompt: list[int], ends: list[int]) -> list[int]:
    """Return the tokens that `generate` writes for one row."""
    found = model.generate(
        **padded([prompt]), max_new_tokens=MOST, do_sample=False, pad_token_id=PAD, eos_token_id=ends
    )
    return found[0, len(prompt) :].tolist()


def without_padding(row: list[int], ends: list[int]) -> list[int]:
    at = next((at for at, token in enumerate(row) if token in ends), len(row))
    return row[: at + 1]


def generated(generator: SlotGenerator, prompts: list[list[int]], ends: list[int]) -> list[list[int]]:
    given = padded(prompts)
    found = generator.generate(**given, pad_token_id=PAD, eos_token_id=ends, max_new_tokens=MOST)
    assert torch.equal(found[:, : given["input_ids"].shape[1]], given["input_ids"])
    return [without_padding(row, ends) for row in found[:, given["input_ids"].shape[1] :].tolist()]


def passes_of(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return a list that gets the attention mask of each pass."""
    masks: list[torch.Tensor] = []
    model.register_forward_pre_hook(
        lambda _module, _given, named: masks.append(named["attention_mask"]), with_kwargs=True
    )
    return masks


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_texts_equal_those_of_each_row_alone(family: str, tmp_path: Path) -> None:
    model = decoder(tmp_path, family)
    vocabulary = model.config.vocab_size
    prompts, ends = prompts_of(40, vocabulary), [3, 5, 6]
    wanted = [alone(model, prompt, ends) for prompt in prompts]
    assert len({len(text) for text in wanted}) > 5, "texts of several lengths"
    ended: list[tuple[int, int]] = []
    generator = SlotGenerator(model, 8 * (12 + MOST), ended=lambda rows, tokens: ended.append((rows, tokens)))
    assert generated(generator, prompts, ends) == wanted
    assert ended == sorted(set(ended))
    assert ended[-1] == (len(prompts), sum(map(len, wanted)))


def test_slots_need_fewer_passes_and_stay_within_the_budget(tmp_path: Path) -> None:
    model = decoder(tmp_path)
    prompts, ends = prompts_of(64, model.config.vocab_size), [3, 5, 6, 7]
    longest = max(map(len, prompts))
    lengths = [len(alone(model, prompt, ends)) for prompt in prompts]
    static = sum(max(lengths[first : first + 8]) for first in range(0, 64, 8))
    counted = passes_of(model)
    rows: list[int] = []
    model.register_forward_pre_hook(
        lambda _module, _given, named: rows.append(len(named["input_ids"])), with_kwargs=True
    )
    generated(SlotGenerator(model, 8 * (longest + MOST)), prompts, ends)
    assert len(counted) < 0.8 * static
    assert max(rows) <= 12, "shorter prompts leave room for more slots than 8"


def test_rows_of_equal_length_need_no_more_passes_than_batches(tmp_path: Path) -> None:
    model = decoder(tmp_path)
    prompts = [prompt[:1] * 3 for prompt in prompts_of(16, model.config.vocab_size)]
    passes = passes_of(model)
    generated(SlotGenerator(model, 8 * (3 + MOST)), prompts, [])
    assert len(passes) == 2 * MOST


def test_slots_that_exceed_memory_are_halved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = decoder(tmp_path)
    prompts, ends = prompts_of(24, model.config.vocab_size), [3, 5]
    wanted = [alone(model, prompt, ends) for prompt in prompts]

    def refuse(_module: torch.nn.Module, _given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if named["attention_mask"].numel() > 150:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    generator = SlotGenerator(model, 16 * (12 + MOST))
    assert generated(generator, prompts, ends) == wanted
    assert generator.slot_tokens < 16 * (12 + MOST)
    assert "halving their tokens" in caplog.text


def test_single_slot_that_exceeds_memory_is_an_error(tmp_path: Path) -> None:
    model = decoder(tmp_path)

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    with pytest.raises(torch.OutOfMemoryError):
        generated(SlotGenerator(model, 512), prompts_of(4, 20), [3])


@pytest.mark.parametrize(
    ("settings", "family", "config", "why"),
    [
        (TextSettings(8, 4, 0.0, 64), "llama", {}, "generation.numBeams is 4"),
        (TextSettings(8, 1, 0.5, 64), "llama", {}, "generation.temperature is 0.5"),
        (SETTINGS, "mistral", {"sliding_window": 8}, "DynamicSlidingWindowLayer, whose rows cannot change slots"),
        (
            SETTINGS,
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            "depend on the longest row",
        ),
    ],
)
def test_reason_is_given_where_texts_would_differ(
    settings: TextSettings, family: str, config: dict[str, Any], why: str, tmp_path: Path
) -> None:
    found = ContinuousBatchingBackend(settings).unavailable(decoder(tmp_path, family, **config), Machine())
    assert found is not None
    assert why in found


def test_generation_config_that_changes_tokens_is_refused(tmp_path: Path) -> None:
    model, backend = decoder(tmp_path), ContinuousBatchingBackend(SETTINGS)
    model.generation_config.update(repetition_penalty=1.0, top_k=20, temperature=0.6, do_sample=True)
    assert backend.unavailable(model, Machine()) is None
    model.generation_config.update(repetition_penalty=1.1)
    found = backend.unavailable(model, Machine())
    assert found == "the model's generation_config.json sets repetition_penalty, which slots do not apply"


def job_of(model: Path, folder: Path, **changes: Any) -> TrainerJob:
    rows = [{"text": text} for text in PROMPTS]
    rows.insert(3, {"text": None})  # type: ignore[dict-item]
    source = {"uri": f"file://{write_lines(folder / 'rows.jsonl', rows)}", "columns": {"text": "text"}}
    generation = changes.pop("generation", {})
    predicts = {"device": "cpu", "batch_tokens": 256, "dataset": source, "columns": ["text"], "max_bad_rows": 1}
    return TrainerJob.model_validate(
        {
            "name": "job",
            "task": "text-generation",
            "model": {"uri": f"file://{model}"},
            "generation": {"max_new_tokens": MOST, **generation},
            "predict": {**predicts, **changes},
        }
    )


def test_stage_by_name_writes_the_texts_of_the_plain_model(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "m", initializer_range=0.5)
    plain, slots = JobPaths(tmp_path / "plain"), JobPaths(tmp_path / "slots")
    predict(job_of(model, tmp_path), plain, NoProgress())
    result = predict(job_of(model, tmp_path, optimization="continuous-batching"), slots, NoProgress())
    assert (result["optimization"], result["rows"], result["bad_rows"]) == ("continuous-batching", len(PROMPTS) + 1, 1)
    assert slots.predictions_jsonl.read_bytes() == plain.predictions_jsonl.read_bytes()


def test_stage_by_name_fails_where_slots_cannot_generate(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "m")
    job = job_of(model, tmp_path, optimization="continuous-batching", generation={"num_beams": 2})
    with pytest.raises(StageError) as caught:
        predict(job, JobPaths(tmp_path / "job"), NoProgress())
    assert caught.value.reason == "BackendNotAvailable"
    assert "generation.numBeams is 2" in caught.value.message


def test_auto_measures_slots_and_takes_the_faster_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "SMALL_SECONDS", 0.0)
    monkeypatch.setattr(choosing, "MEASURING_SHARE", 1e9)
    monkeypatch.setattr(backend_in_use, "TEXT_SAMPLE_SHARE", 1e9)
    paths = JobPaths(tmp_path / "job")
    model = write_decoder(tmp_path / "m", initializer_range=0.5)
    result = predict(job_of(model, tmp_path, optimization="measured"), paths, NoProgress())
    rows = {row.name: row for row in BackendTable.model_validate_json(paths.optimization.read_bytes()).backends}
    assert "predict.server names no server" in rows["vllm"].why
    slots, none = rows["continuous-batching"], rows["none"]
    assert slots.agreement == 1
    assert slots.rows_per_second is not None
    assert none.rows_per_second is not None
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [row["generated_text"] for row in read_lines(paths.predictions_jsonl)]
    tokens = sum(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
    assert slots.tokens_per_second == pytest.approx(slots.rows_per_second * tokens / len(texts))
    write_report(job_of(model, tmp_path), None, paths)
    assert "tokens/s" in paths.report.read_text(encoding="utf-8")
    faster = slots.rows_per_second > none.rows_per_second
    assert result["optimization"] == ("continuous-batching" if faster else "none")


def test_few_texts_are_not_measured(tmp_path: Path) -> None:
    paths = JobPaths(tmp_path / "job")
    model = write_decoder(tmp_path / "m")
    assert predict(job_of(model, tmp_path, optimization="measured"), paths, NoProgress())["optimization"] == "none"
    found = BackendTable.model_validate_json(paths.optimization.read_bytes())
    assert found.reason == "fewer than 1,280 texts are too few to measure"
