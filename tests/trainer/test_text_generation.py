"""The task text-generation: learnt tokens, packs whose rows do not see each other, and written texts."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune_contract.choices import Stage
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data import row_shards
from finetune_trainer.data.packing import best_fit
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.predict.evaluate import evaluate
from finetune_trainer.predict.predict import predict
from finetune_trainer.predict.runner import answers_of
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.tasks.task_protocol import Coding
from finetune_trainer.tasks.text_generation import text_generation
from trainer_support.tasks import (
    DATA,
    SPECIAL,
    TEMPLATE,
    WITHOUT_DATA,
    WORDS,
    common_words,
    losses,
    predictions,
    real_rows,
    task_job,
    texts,
    trained,
    training_of,
    word_tokenizer,
    write_decoder,
    write_lines,
)

NOT_LEARNT = -100


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for seed, (split, count) in enumerate({"train": 160, "validation": 12, "test": 14}.items()):
        write_lines(tmp_path / "data" / f"{split}.jsonl", texts(count, seed))
    return tmp_path / "data"


def coding(max_length: int = 16, stride: int = 4, tokenizer: Any = None) -> Coding:
    return Coding(tokenizer or word_tokenizer(), max_length, stride, "llama")


def ids_of(text: str) -> list[int]:
    return [[*SPECIAL, *WORDS].index(word) for word in text.split()]


def learnt(labels: list[int]) -> str:
    return " ".join("." if each == NOT_LEARNT else [*SPECIAL, *WORDS][each] for each in labels)


def encoded(rows: dict[str, list[Any]], targets: list[Any] | None, **settings: Any) -> Any:
    wanted = None if targets is None else np.array(targets, object)
    return text_generation().encoding.encode(rows, wanted, coding(**settings))


# ------------------------------------------------------------------------------------------------------- learnt tokens


def test_a_text_is_learnt_whole_but_its_first_token_and_ends() -> None:
    found = encoded({"text": ["the cat sees", "dog"]}, [True, True])
    assert found.features["input_ids"] == [ids_of("the cat sees </s>"), ids_of("dog </s>")]
    assert [learnt(each) for each in found.features["labels"]] == [". cat sees </s>", ". </s>"]
    assert found.features["prompt"] == [3, 1]


def test_each_token_is_learnt_once_in_overlapping_windows() -> None:
    words = [WORDS[i % len(WORDS)] for i in range(37)]
    found = encoded({"text": [" ".join(words)]}, [True])
    windows, labels = found.features["input_ids"], found.features["labels"]
    assert [len(each) for each in windows] == [16, 16, 14]
    assert found.rows == [0, 0, 0]
    assert found.truncated == 0
    assert windows[0][-4:] == windows[1][:4]
    counted = [token for each in labels for token in each if token != NOT_LEARNT]
    assert counted == ids_of(" ".join([*words[1:], "</s>"]))
    assert labels[1][:4] == [NOT_LEARNT] * 4


@pytest.mark.parametrize(
    ("source", "target", "ids", "wanted", "cut"),
    [
        ("the cat", "sees a dog", "the cat sees a dog </s>", ". . sees a dog </s>", 0),
        ("the the cat", "a fish", "the the cat a <unk> </s>", ". . . a <unk> </s>", 0),
        ("the " * 20 + "cat", "sees a dog", "the " * 11 + "cat sees a dog </s>", ". " * 12 + "sees a dog </s>", 1),
        ("the " * 20 + "cat", "dog " * 20, "the " * 7 + "cat " + "dog " * 8, ". " * 8 + "dog " * 8, 1),
        ("cat", "dog " * 20, "cat " + "dog " * 15, ". " + "dog " * 15, 1),
    ],
)
def test_only_the_reply_is_learnt_and_the_prompt_is_truncated_at_its_start(source, target, ids, wanted, cut):
    found = encoded({"source": [source]}, [target])
    assert found.features["input_ids"] == [ids_of(ids)]
    assert [learnt(each) for each in found.features["labels"]] == [wanted.strip()]
    assert found.truncated == cut


CHAT = [
    {"role": "system", "content": "the house", "name": None},
    {"role": "user", "content": "a cat", "name": None},
    {"role": "assistant", "content": "sees a dog", "name": None},
    {"role": "user", "content": "then", "name": None},
    {"role": "assistant", "content": "sleeps", "name": None},
]


def test_of_a_conversation_the_replies_are_learnt_with_their_ends() -> None:
    found = encoded({"messages": [CHAT]}, [True], max_length=40)
    whole = "<|system|> the house </s> <|user|> a cat </s> <|assistant|> sees a dog </s> "
    whole += "<|user|> then </s> <|assistant|> sleeps </s>"
    assert found.features["input_ids"] == [ids_of(whole)]
    expected = ". . . . . . . . . sees a dog </s> . . . . sleeps </s>"
    assert [learnt(each) for each in found.features["labels"]] == [expected]
    assert found.features["prompt"] == [ids_of(whole).index(ids_of("sleeps")[0])]


def test_to_write_the_last_reply_is_left_out() -> None:
    found = encoded({"messages": [CHAT]}, None, max_length=40)
    prompt = (
        "<|system|> the house </s> <|user|> a cat </s> <|assistant|> sees a dog </s> <|user|> then </s> <|assistant|>"
    )
    assert found.features["input_ids"] == [ids_of(prompt)]
    assert "labels" not in found.features


def test_template_that_rewrites_earlier_turns_is_refused() -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace(
        "{{ message['content'] }}", "{{ message['content'] if loop.last else 'the' }}"
    )
    with pytest.raises(StageError, match="writes message 3 in another way"):
        encoded({"messages": [CHAT]}, [True], tokenizer=tokenizer)


def test_without_a_chat_template_conversations_are_refused() -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(StageError, match="no chat template"):
        encoded({"messages": [CHAT]}, [True], tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("rows", "columns", "reason"),
    [
        ([{"text": None}, {"text": "a cat"}], ["text"], "NullText"),
        ([{"text": 3}], ["text"], "NotText"),
        ([{"source": "a", "target": None}, {"source": "a", "target": "b"}], ["source", "target"], "NullText"),
        ([{"messages": "a cat"}], ["messages"], "NotMessages"),
        ([{"messages": []}, {"messages": CHAT}], ["messages"], "NoMessages"),
        ([{"messages": [{"role": None, "content": "a"}, *CHAT]}], ["messages"], "NoRole"),
        ([{"messages": CHAT}, {"messages": CHAT[:2]}], ["messages"], "NoReply"),
        ([{"text": "a", "source": "b"}], ["text", "source"], "ColumnsDisagree"),
        ([{"source": "b"}], ["source"], "ColumnsDisagree"),
    ],
)
def test_rows_that_cannot_be_learnt_are_refused(llama, tmp_path, paths, rows, columns, reason):
    write_lines(tmp_path / "bad" / "train.jsonl", rows)
    job = task_job("text-generation", llama, tmp_path / "bad", columns, training=training_of(steps=1), predict=None)
    with pytest.raises(StageError) as caught:
        prepare(job, paths, NoProgress())
    assert caught.value.reason == reason


# --------------------------------------------------------------------------------------------------------------- packs


@given(st.lists(st.integers(1, 50), max_size=60))
def test_packs_hold_each_feature_once_and_no_more_than_fits(lengths: list[int]) -> None:
    packs = best_fit(np.array(lengths, np.int64), 50)
    assert sorted(at for pack in packs for at in pack) == list(range(len(lengths)))
    assert all(sum(lengths[at] for at in pack) <= 50 for pack in packs)
    assert len(packs) <= 11 / 9 * math.ceil(sum(lengths) / 50) + max(4, sum(2 * each > 50 for each in lengths))


def test_packs_are_filled_as_well_as_they_can_be() -> None:
    draw = np.random.default_rng(3)
    lengths = draw.integers(20, 200, 5000)
    packs = best_fit(lengths, 512)
    assert lengths.sum() / (len(packs) * 512) > 0.99


def alone(model: Any, text: str) -> list[float]:
    """Return the cross-entropy of each token but the first, in a pass over nothing else."""
    ids = torch.tensor([[*ids_of(text), 3]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_the_loss_of_a_row_does_not_depend_on_its_neighbours_in_a_pack(tmp_path, data, paths, family):
    folder = write_decoder(tmp_path / "model", family)
    job = task_job(
        "text-generation",
        folder,
        data,
        ["text"],
        training=training_of(steps=1),
        preparation={"max_length": 64, "packing": True},
    )
    facts = prepare(job, paths, NoProgress())
    prepared, task = PreparedData.open(paths), text_generation()
    train = facts.splits["train"]
    assert train.packs_of == 160
    assert train.rows == len(prepared.lengths("train")) < 60
    assert facts.splits["test"].packs_of is None
    model = task.head.build_model(job, facts).eval()
    batch = task.encoding.collate(prepared.features("train", range(train.rows)), pad_token_id=prepared.pad_token_id)
    with torch.no_grad():
        answers = task.scoring.answer(model, batch, [])
        together = float(model(**batch, use_cache=False).loss)
    expected = [lost for row in texts(160, 0) for lost in alone(model, row["text"])]
    found = np.concatenate([answer["nll"] for answer in answers])
    np.testing.assert_allclose(np.sort(found), np.sort(expected), rtol=1e-4, atol=1e-5)
    assert together == pytest.approx(np.mean(expected), rel=1e-5)
    assert task.encoding.items(batch) == len(expected)


def test_a_model_that_would_mix_the_rows_of_a_pack_is_refused(tmp_path, data, paths):
    folder = tmp_path / "bloom"
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model("bloom", vocab_size=40, hidden_size=32, n_layer=2, n_head=4, eos_token_id=3)
    ).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    job = task_job(
        "text-generation", folder, data, ["text"], training=training_of(steps=1), preparation={"packing": True}
    )
    with pytest.raises(StageError, match="models of type bloom do not keep the rows of a pack apart"):
        prepare(job, paths, NoProgress())


def test_packs_of_a_model_that_is_to_keep_its_cache_are_refused(llama, data, paths):
    training = {**training_of(steps=1), "arguments": {"use_cache": True}}
    job = task_job("text-generation", llama, data, ["text"], training=training, preparation={"packing": True})
    with pytest.raises(StageError, match=r"with training\.arguments\.use_cache"):
        prepare(job, paths, NoProgress())


def test_a_model_that_mixes_rows_all_the_same_is_refused(llama, data, paths, monkeypatch):
    """A model whose masks ignore positions would mix them."""
    import transformers.masking_utils

    job = task_job(
        "text-generation", llama, data, ["text"], training=training_of(steps=1), preparation={"packing": True}
    )
    facts = prepare(job, paths, NoProgress())
    text_generation().head.build_model(job, facts)
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda positions: None)
    with pytest.raises(StageError) as caught:
        text_generation().head.build_model(job, facts)
    assert caught.value.reason == "PackingNotInEffect"


def test_rows_of_a_task_that_cannot_share_sequences_are_not_packed(tmp_path, paths, llama):
    write_lines(tmp_path / "train.jsonl", [{"text": "the cat", "label": 0}] * 2)
    job = task_job(
        "text-classification",
        llama,
        tmp_path,
        ["text", "label"],
        training=training_of(steps=1),
        preparation={"packing": True},
    )
    with pytest.raises(StageError, match="cannot share a sequence"):
        prepare(job, paths, NoProgress())


# ------------------------------------------------------------------------------------------------- training, evaluation


@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packs"])
def test_it_learns_and_is_judged_as_a_plain_loop_would(llama, data, paths, packing):
    """The first loss is that of the untrained model; afterwards perplexity is that of a pass over each row alone."""
    job = task_job(
        "text-generation",
        llama,
        data,
        ["text"],
        training=training_of(steps=60, batch=8, micro=4, learning_rate=1e-2),
        preparation={"max_length": 32, "packing": packing},
    )
    trained(job, paths)
    found_losses = losses(paths)
    assert found_losses[0] == pytest.approx(math.log(len(SPECIAL) + len(WORDS)), abs=0.3)
    measured = evaluate(job, paths, NoProgress())["evaluate"]
    model = AutoModelForCausalLM.from_pretrained(paths.model).eval()
    expected = [lost for row in texts(14, 2) for lost in alone(model, row["text"])]
    assert measured["loss"] == pytest.approx(np.mean(expected), rel=1e-5)
    assert measured["perplexity"] == pytest.approx(math.exp(np.mean(expected)), rel=1e-5)
    # One noun of three follows an article, one verb of three a noun: 2.56 is the least possible, 2.58 and 2.60 were
    # measured, and knowing only the words' frequencies gives 7.2.
    assert measured["perplexity"] < 3.5
    assert (measured["rows"], measured["split"]) == (14, "test")


def test_generated_text_equals_that_of_the_model_alone(llama, data, paths):
    job = task_job(
        "text-generation",
        llama,
        data,
        ["text"],
        training=training_of(steps=2),
        preparation={"max_length": 32},
        generation={"max_new_tokens": 12},
        predict={"device": "cpu", "batch_tokens": 256, "columns": ["text"]},
    )
    trained(job, paths)
    progress = Rates()
    result = predict(job, paths, progress)
    model = AutoModelForCausalLM.from_pretrained(paths.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(paths.model)
    rows, count = texts(14, 2), 0
    for row, answer in zip(rows, predictions(paths), strict=True):
        given = tokenizer(row["text"], return_tensors="pt")
        out = model.generate(**given, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert answer["text"] == row["text"]
        assert answer["generated_text"] == tokenizer.decode(
            out[0, given["input_ids"].shape[1] :], skip_special_tokens=True
        )
        count += sum(token not in tokenizer.all_special_ids for token in out[0, given["input_ids"].shape[1] :].tolist())
    figures = {"generated_tokens": count, "tokens_per_second": result["tokens_per_second"]}
    assert result.items() >= figures.items()
    assert json.loads(paths.metrics.read_bytes())["generation"] == {"predict": figures}
    assert progress.rates[-1] > 0


class Rates(NoProgress):
    """Records the rates of generated tokens."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def update(self, step: int, total: int, **values: float) -> None:
        self.rates.append(values.get("tokens_per_second", 0.0))


def test_beams_and_samples_follow_the_settings_and_are_reproducible(llama, data, paths):
    job = task_job("text-generation", llama, data, ["text"], training=training_of(steps=1))
    trained(job, paths)
    split = PreparedData.open(paths).of("test")
    model = text_generation().head.load_model(job, str(paths.model), {}, torch.float32)

    def generated(**generation: Any) -> list[str]:
        job_with_generation = task_job(
            "text-generation", llama, data, ["text"], training=training_of(steps=1), generation=generation
        )
        found = answers_of(
            Stage.PREDICT, job_with_generation, model, split, device="cpu", batch_tokens=4096, progress=NoProgress()
        )
        return [str(answer["generated_text"]) for answer in found]

    greedy, drawn = generated(max_new_tokens=9), generated(max_new_tokens=9, temperature=1.0, top_p=0.9)
    assert drawn == generated(max_new_tokens=9, temperature=1.0, top_p=0.9)
    assert drawn != greedy
    assert generated(max_new_tokens=9, num_beams=4) != greedy


def test_equal_prompts_of_two_shards_are_drawn_apart_and_drawn_again_alike(llama, data, tmp_path, paths, monkeypatch):
    monkeypatch.setattr(row_shards, "LEAST_BYTES", 200)
    rows = write_lines(tmp_path / "prompts.jsonl", [{"text": "the cat sees the"}] * 40)
    predict_settings = {
        "dataset": {"uri": f"file://{rows}", "columns": {"text": "text"}},
        "device": "cpu",
        "batch_tokens": 4096,
    }
    job = task_job(
        "text-generation",
        llama,
        data,
        ["text"],
        training=training_of(steps=1),
        generation={"max_new_tokens": 8, "temperature": 1.0},
        predict=predict_settings,
    )
    trained(job, paths)
    predict(job, paths, NoProgress())
    first = [row["generated_text"] for row in predictions(paths)]
    assert len(set(first)) > 20, "a few rows are in each shard"
    predict(job, paths, NoProgress())
    assert [row["generated_text"] for row in predictions(paths)] == first


def test_answers_that_leave_a_prompt_no_room_are_refused(llama, data, paths):
    job = task_job("text-generation", llama, data, ["text"], training=training_of(steps=1))
    trained(job, paths)
    longer = job.generation.model_copy(update={"max_new_tokens": 128})
    with pytest.raises(StageError, match="the model holds 128 tokens"):
        predict(job.model_copy(update={"generation": longer}), paths, NoProgress())


def test_conversations_are_learnt_judged_and_answered(llama, tmp_path, paths):
    """A question for an animal gets its verb."""
    verbs = {"cat": "sees", "dog": "hears", "bird": "finds"}
    draw = random.Random(1)
    for split, count in {"train": 96, "validation": 8, "test": 12}.items():
        rows = []
        for _ in range(count):
            first, second = draw.choices(list(verbs), k=2)
            rows.append(
                {
                    "messages": [
                        {"role": "user", "content": f"the {first}"},
                        {"role": "assistant", "content": f"{verbs[first]} ."},
                        {"role": "user", "content": f"a {second}"},
                        {"role": "assistant", "content": f"{verbs[second]} ."},
                    ]
                }
            )
        write_lines(tmp_path / "chat" / f"{split}.jsonl", rows)
    job = task_job(
        "text-generation",
        llama,
        tmp_path / "chat",
        ["messages"],
        training=training_of(steps=60, learning_rate=1e-2),
        predict={"device": "cpu", "batch_tokens": 512, "columns": ["messages"]},
        generation={"max_new_tokens": 8},
    )
    trained(job, paths)
    assert evaluate(job, paths, NoProgress())["evaluate"]["accuracy"] == 1.0
    predict(job, paths, NoProgress())
    for answer in predictions(paths):
        assert answer["generated_text"] == answer["messages"][-1]["content"]
    card = (paths.model / "README.md").read_text(encoding="utf-8")
    assert '"role": "user"' in card
    assert "| perplexity |" in card
    assert json.loads(paths.metrics.read_text())["evaluate"]["perplexity"] < 1.05


@pytest.mark.skipif(not DATA.is_dir(), reason=WITHOUT_DATA)
@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packs"])
def test_real_instructions_are_learnt(tmp_path, paths, packing):
    """A random model of two layers gets far below guessing among all words in a few steps."""
    instructions = [
        {"source": f"{row['instruction']} {row['input']} =>", "target": row["output"]}
        for row in real_rows("instruct/train.jsonl", 420)
    ]
    known = common_words(f"{row['source']} {row['target']}" for row in instructions)
    folder = write_decoder(tmp_path / "model", words=known)
    write_lines(tmp_path / "rows" / "train.jsonl", instructions[:400])
    write_lines(tmp_path / "rows" / "test.jsonl", instructions[400:])
    job = task_job(
        "text-generation",
        folder,
        tmp_path / "rows",
        ["source", "target"],
        training=training_of(steps=24, batch=8, learning_rate=1e-2),
        preparation={"max_length": 128, "packing": packing},
        predict=None,
    )
    trained(job, paths)
    assert losses(paths)[0] == pytest.approx(math.log(len(known)), abs=0.5)
    assert evaluate(job, paths, NoProgress())["evaluate"]["perplexity"] < 0.3 * len(known)
    samples = json.loads((paths.root / "samples.json").read_text(encoding="utf-8"))
    assert [each["score"] for each in samples] == sorted((each["score"] for each in samples), reverse=True)
    assert all(each["text"][0] and "predicted" not in each for each in samples)
    assert 0 < len(samples) <= 20
