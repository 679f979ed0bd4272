"""Logits of long rows are computed and judged in parts, within the memory that the plan counts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from finetune_contract.plans import JUDGED_LOGITS
from finetune_contract.trainer_job import Preference
from finetune_trainer.tasks import writing
from finetune_trainer.tasks.preference_tuning import preference_tuning
from finetune_trainer.tasks.text_generation import text_generation
from finetune_trainer.tasks.writing import judged, token_nlls
from finetune_trainer.training.run import _validation_tokens

NOT_LEARNT = -100


def long_row(vocabulary: int, pieces: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of a row that takes so many pieces, and labels, every seventh of which is not learnt."""
    tokens = int(pieces * (JUDGED_LOGITS // vocabulary) * 7 / 6)
    drawn = torch.Generator().manual_seed(3)
    logits = torch.randn(tokens, vocabulary, generator=drawn).to(dtype)
    labels = torch.randint(vocabulary, (tokens,), generator=drawn)
    labels[::7] = NOT_LEARNT
    return logits, labels


def allocated(profile: torch.profiler.profile, folder: Path) -> list[int]:
    """Return the bytes in use after each allocation and release, as reported by torch's own allocator."""
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [each["args"]["Total Allocated"] for each in events if each["name"] == "[memory]"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_row_is_judged_in_pieces_as_it_would_be_at_once(dtype: torch.dtype):
    logits, labels = long_row(32_768, 1.3, dtype)
    nothing = torch.full_like(labels, NOT_LEARNT)
    one, none = token_nlls([(torch.stack([logits, logits]), torch.stack([labels, nothing]))])
    learnt = labels != NOT_LEARNT
    whole = torch.nn.functional.cross_entropy(logits[learnt].float(), labels[learnt], reduction="none")
    assert len(whole) * 32_768 > JUDGED_LOGITS
    np.testing.assert_array_equal(one["nll"], whole.numpy())
    np.testing.assert_array_equal(one["hit"], (logits[learnt].argmax(-1) == labels[learnt]).numpy())
    assert [none[name].shape for name in ("nll", "hit")] == [(0,), (0,)]
    assert (none["nll"].dtype, none["hit"].dtype) == (np.float32, np.bool_)


def test_pieces_are_of_bounded_size_but_where_gradients_keep_all_of_them():
    logits, labels = long_row(65_536, 2.5, torch.bfloat16)
    sizes = [chosen.numel() for chosen, _ in judged(logits, labels)]
    assert len(sizes) == 3
    assert max(sizes) <= JUDGED_LOGITS
    assert sum(sizes) == int((labels != NOT_LEARNT).sum()) * 65_536
    few, some = long_row(16, 0.0001, torch.float32)
    assert len(list(judged(few.requires_grad_(), some))) == 1
    ((wide, _),) = judged(torch.zeros(1, JUDGED_LOGITS + 1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64))
    assert wide.shape == (1, JUDGED_LOGITS + 1)


def test_judging_uses_the_planned_memory_for_any_row_length(tmp_path: Path):
    """Measured by torch's own allocator. The plan counts a copy in the model's dtype, and twice float32."""
    logits, labels = long_row(65_536, 3.2, torch.bfloat16)
    batch = logits[None], labels[None]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        token_nlls([batch])
    totals = allocated(profile, tmp_path)
    assert len(totals) > 10
    assert sum(later > before for before, later in pairwise(totals)) >= 8, "two tensors or more for each of four pieces"
    peak, counted = max(totals) - min(totals), (2 + 8) * JUDGED_LOGITS
    assert 0.5 * counted < peak < 1.02 * counted
    assert counted < 0.4 * (2 + 8) * logits.numel(), "a row that is long enough to tell"


# -------------------------------------------------------------------------------------------------- computed in parts

VOCABULARY = 96
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4},
    "qwen3": {"head_dim": 12},
    # These two change the logits after the head.
    "gemma2": {"head_dim": 12, "final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.25},
}


def decoder(family: str, **config: Any) -> PreTrainedModel:
    """Return a random decoder; its weights are large enough for tokens to differ."""
    sizes: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    given = {**sizes, **FAMILIES[family], **config}
    if family == "gpt2":
        given = {name: value for name, value in given.items() if not name.startswith(("hidden", "inter", "num_"))}
    torch.manual_seed(7)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given))
    return cast(PreTrainedModel, model.eval())


class LogitRecorder:
    """Counts a decoder's passes, and the logits computed by its head."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.read = 0
        self.sizes: list[int] = []
        model.get_input_embeddings().register_forward_hook(self._reads)
        model.get_output_embeddings().register_forward_hook(self._record)

    def _reads(self, *_: object) -> None:
        self.read += 1

    def _record(self, _: object, __: object, logits: torch.Tensor) -> None:
        self.sizes.append(logits.numel())


def rows_to_read(sizes: Sequence[int], prompt: int) -> list[dict[str, Any]]:
    """Return features of text-generation; the first `prompt` tokens are not learnt."""
    drawn = np.random.default_rng(5)
    features = []
    for size in sizes:
        ids = drawn.integers(3, VOCABULARY, size).tolist()
        features.append({"input_ids": ids, "labels": [NOT_LEARNT] * len(ids[:prompt]) + ids[prompt:]})
    return features


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_reads_long_rows_once_and_gives_the_same_in_parts(family: str, monkeypatch: pytest.MonkeyPatch):
    model, task = decoder(family), text_generation()
    batch = task.encoding.collate(rows_to_read([50, 41, 3], prompt=20), pad_token_id=0)
    recorder = LogitRecorder(model)
    with torch.inference_mode():
        whole = task.scoring.answer(model, batch, [])
        assert (recorder.read, recorder.sizes) == (1, [3 * 50 * VOCABULARY])
        monkeypatch.setattr(writing, "REQUESTED_LOGITS", 3 * 8 * VOCABULARY + 5)
        parts = task.scoring.answer(model, batch, [])
    # None of the prompts' logits, where no row has a label; the last token predicts nothing.
    assert (recorder.read, recorder.sizes[1:]) == (2, [3 * 8 * VOCABULARY] * 3 + [3 * 6 * VOCABULARY])
    assert [len(answer["nll"]) for answer in parts] == [30, 21, 0]
    for one, other in zip(parts, whole, strict=True):
        np.testing.assert_allclose(one["nll"], other["nll"], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(one["hit"], other["hit"])
    again = task.encoding.collate(rows_to_read([9], prompt=2), pad_token_id=0)
    with torch.inference_mode():
        task.scoring.answer(model, again, [])
    assert recorder.read == 3, "a batch of its own is read for itself"


def test_both_answers_of_a_pair_are_as_likely_in_parts(monkeypatch: pytest.MonkeyPatch):
    model, task = decoder("llama"), preference_tuning(Preference())
    pairs = zip(rows_to_read([50, 22], prompt=20), rows_to_read([31, 44], prompt=20), strict=True)
    features = [
        {**{name: one[name] + other[name] for name in one}, "chosen": len(one["input_ids"])} for one, other in pairs
    ]
    batch, recorder = task.encoding.collate(features, pad_token_id=0), LogitRecorder(model)
    with torch.inference_mode():
        whole = task.scoring.answer(model, batch, [])
        monkeypatch.setattr(writing, "REQUESTED_LOGITS", 4 * 8 * VOCABULARY)
        parts = task.scoring.answer(model, batch, [])
    assert (recorder.read, len(recorder.sizes)) == (2, 1 + 4)
    assert [list(answer) for answer in parts] == [["chosen", "rejected"]] * 2
    for one, other in zip(parts, whole, strict=True):
        np.testing.assert_allclose(list(one.values()), list(other.values()), rtol=1e-5)


def test_rows_without_labels_are_read_and_have_an_empty_nll(monkeypatch: pytest.MonkeyPatch):
    model, task = decoder("llama"), text_generation()
    monkeypatch.setattr(writing, "REQUESTED_LOGITS", 1)
    with torch.inference_mode():
        answers = task.scoring.answer(model, task.encoding.collate(rows_to_read([7, 5], prompt=7), pad_token_id=0), [])
    assert [answer["nll"].shape for answer in answers] == [(0,), (0,)]


def test_processes_sharing_a_model_run_it_once_for_any_row_length(monkeypatch: pytest.MonkeyPatch):
    model, task = decoder("llama"), text_generation()
    batch, recorder = task.encoding.collate(rows_to_read([50, 41], prompt=0), pad_token_id=0), LogitRecorder(model)
    monkeypatch.setattr(writing, "REQUESTED_LOGITS", 1)
    with torch.no_grad():
        task.scoring.answer(model, batch, [])
    assert (recorder.read, recorder.sizes) == (1, [2 * 50 * VOCABULARY])


def test_logits_of_a_long_row_take_no_more_memory_than_the_plan_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    vocabulary, tokens, requested = 65_536, 4097, 1 << 26
    model = decoder("llama", vocab_size=vocabulary, hidden_size=16, intermediate_size=16).to(torch.bfloat16)
    batch = text_generation().encoding.collate(rows_to_read([tokens], prompt=1), pad_token_id=0)
    monkeypatch.setattr(writing, "REQUESTED_LOGITS", requested)
    with (
        torch.inference_mode(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        (answer,) = text_generation().scoring.answer(model, batch, [])
    totals = allocated(profile, tmp_path)
    peak, counted = max(totals) - min(totals), 2 * 2 * requested + (2 + 8) * JUDGED_LOGITS
    assert len(answer["nll"]) == tokens - 1
    # The activations of a tiny model come on top.
    assert 0.5 * counted < peak < 1.05 * counted
    assert counted < 0.7 * (2 * tokens * vocabulary + (2 + 8) * JUDGED_LOGITS), "a row that is long enough to tell"


def test_validation_batches_of_language_models_have_bounded_logits() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = AutoConfig.for_model("llama", vocab_size=1 << 16, **sizes)
    decoder = AutoModelForCausalLM.from_config(config)
    assert _validation_tokens(decoder, 4, 128) == 4 * 4 * 128
    assert _validation_tokens(decoder, 16, 512) == 4096, "as many as REQUESTED_LOGITS allows"
    assert _validation_tokens(decoder, 2, 8192) == 8192, "a row"
    classifier = AutoModelForSequenceClassification.from_config(config)
    assert _validation_tokens(classifier, 2, 8192) == 4 * 2 * 8192
