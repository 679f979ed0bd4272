"""The task preference-tuning: pairs, the objective as in trl, and the initial model as reference."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import Preference, TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.predict.evaluate import evaluate
from finetune_trainer.predict.predict import predict
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.stage.stages import refuse_combinations
from finetune_trainer.tasks.preference_tuning import preference_tuning
from finetune_trainer.tasks.task_protocol import Coding
from finetune_trainer.tasks.task_registry import task_of
from finetune_trainer.training.order import EpochOrder
from trainer_support.tasks import (
    DATA,
    SPECIAL,
    WITHOUT_DATA,
    WORDS,
    common_words,
    losses,
    predictions,
    read_lines,
    real_rows,
    run_card,
    task_job,
    train_here,
    trained,
    training_of,
    word_tokenizer,
    write_decoder,
    write_lines,
)

COLUMNS = ("prompt", "chosen", "rejected")
NOT_LEARNT = -100


def pairs(count: int, seed: int, *, talk: bool = False) -> list[dict[str, Any]]:
    """Return pairs that prefer "sees" to "hears"; answers differ in length."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        prompt = " ".join(draw.choices(["the", "a", "cat", "dog", "bird"], k=draw.randint(1, 6)))
        answers = [" ".join(draw.choices([verb, "tree", "."], k=draw.randint(1, 8))) for verb in ("sees", "hears")]
        if talk:
            turns = [{"role": "user", "content": prompt}]
            replies = [[{"role": "assistant", "content": answer}] for answer in answers]
            rows.append({"prompt": turns, "chosen": replies[0], "rejected": replies[1]})
        else:
            rows.append({"prompt": f"{prompt} ", "chosen": answers[0], "rejected": answers[1]})
    return rows


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for seed, (split, count) in enumerate({"train": 40, "validation": 10, "test": 12}.items()):
        write_lines(tmp_path / "data" / f"{split}.jsonl", pairs(count, seed))
    return tmp_path / "data"


def job_on(model: Path, data: Path, *, steps: int = 10, **changes: Any) -> TrainerJob:
    """Return a job with two micro-batches a step. Adam divides by the size of a gradient: without a larger epsilon, one
    of mere rounding would count as any other.
    """
    training = {
        **training_of(steps=steps, batch=8, micro=4, steps_per_epoch=5, learning_rate=1e-3),
        "arguments": {"adam_epsilon": 1e-5},
        **changes.pop("training", {}),
    }
    return task_job("preference-tuning", model, data, COLUMNS, training=training, **changes)


# --------------------------------------------------------------------------------------------------------------- pairs


def ids_of(text: str) -> list[int]:
    return [[*SPECIAL, *WORDS].index(word) for word in text.split()]


def text_of(ids: list[int]) -> str:
    return " ".join("." if each == NOT_LEARNT else [*SPECIAL, *WORDS][each] for each in ids)


def encoded(prompt: Any, answers: tuple[Any, Any] | None, max_length: int = 16) -> Any:
    targets = None
    if answers is not None:
        targets = np.empty(1, object)
        targets[0] = answers
    coding = Coding(word_tokenizer(), max_length, 4, "llama")
    return preference_tuning(Preference()).encoding.encode({"prompt": [prompt]}, targets, coding)


def halves(found: Any, column: str) -> list[str]:
    (end,), (values,) = found.features["chosen"], found.features[column]
    return [text_of(values[:end]), text_of(values[end:])]


def test_pair_has_the_prompt_with_each_answer_and_only_answers_are_learnt() -> None:
    found = encoded("the cat", ("sees a dog", "sleeps"))
    assert halves(found, "input_ids") == ["the cat sees a dog </s>", "the cat sleeps </s>"]
    assert halves(found, "labels") == [". . sees a dog </s>", ". . sleeps </s>"]
    assert found.features["prompt"] == [2]
    assert found.truncated == 0


LONG = "the " * 20 + "cat"


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected", "expected"),
    [
        (LONG, "sees a dog", "sleeps", ["the " * 11 + "cat sees a dog </s>", "the " * 11 + "cat sleeps </s>"]),
        (LONG, "dog " * 20, "sleeps", ["the " * 7 + "cat " + "dog " * 8, "the " * 7 + "cat sleeps </s>"]),
        ("cat", "dog", "tree " * 20, ["cat dog </s>", "cat " + "tree " * 15]),
    ],
    ids=["the prompt gives way", "down to half", "then the answer"],
)  # fmt: skip
def test_truncated_pair_keeps_the_same_end_of_the_prompt_for_both(prompt, chosen, rejected, expected):
    found = encoded(prompt, (chosen, rejected))
    assert halves(found, "input_ids") == [each.strip() for each in expected]
    assert found.truncated == 1


def test_conversations_are_answered_by_the_chat_template() -> None:
    talk = [
        {"role": "user", "content": "a cat"},
        {"role": "assistant", "content": "sees"},
        {"role": "user", "content": "then"},
    ]
    reply = {"role": "assistant", "content": "sleeps", "name": None}
    found = encoded(talk, (reply, {**reply, "content": "a tree"}), max_length=40)
    prompt = "<|user|> a cat </s> <|assistant|> sees </s> <|user|> then </s> <|assistant|>"
    assert halves(found, "input_ids") == [f"{prompt} sleeps </s>", f"{prompt} a tree </s>"]
    unlearnt = " ".join("." for _ in prompt.split())
    assert halves(found, "labels") == [f"{unlearnt} sleeps </s>", f"{unlearnt} a tree </s>"]
    assert text_of(encoded(talk, None, max_length=40).features["input_ids"][0]) == prompt


TURN = [{"role": "user", "content": "a cat"}]
REPLY = [{"role": "assistant", "content": "sees"}]


@pytest.mark.parametrize(
    ("row", "columns", "reason"),
    [
        ({"prompt": None, "chosen": "a", "rejected": "b"}, COLUMNS, "NotText"),
        ({"prompt": "a", "chosen": "a", "rejected": 3}, COLUMNS, "NotText"),
        ({"prompt": "a", "chosen": REPLY, "rejected": REPLY}, COLUMNS, "NotText"),
        ({"prompt": TURN, "chosen": "a", "rejected": "b"}, COLUMNS, "NotMessages"),
        ({"prompt": TURN, "chosen": REPLY, "rejected": TURN}, COLUMNS, "NotOneReply"),
        ({"prompt": TURN, "chosen": [*TURN, *REPLY], "rejected": REPLY}, COLUMNS, "NotOneReply"),
        ({"prompt": "a", "chosen": "a", "rejected": "b"}, ("prompt", "chosen"), "MissingSetting"),
        ({"prompt": "a", "chosen": "a", "rejected": "b"}, (*COLUMNS, "text"), "ColumnOfAnotherTask"),
    ],
)
def test_rows_that_are_no_preferences_are_refused(llama, tmp_path, paths, row, columns, reason):
    write_lines(tmp_path / "bad" / "train.jsonl", [row, row])
    job = task_job("preference-tuning", llama, tmp_path / "bad", columns, training=training_of(steps=1), predict=None)
    with pytest.raises(StageError) as caught:
        prepare(job, paths, NoProgress())
    assert caught.value.reason == reason


# ---------------------------------------------------------------------------------------------------------- the field


class Losses(TrainerCallback):
    """Records the loss of each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        if logs and "loss" in logs:
            self.found.append(logs["loss"])


def by_trl(job: TrainerJob, paths: JobPaths, folder: Path, model: Any) -> tuple[list[float], Any]:
    """Train with trl's DPOTrainer over the same rows in the same order; return the losses and the trainer."""
    trl = pytest.importorskip("trl", reason="trl is not installed: make install")
    from datasets import Dataset

    training, prepared = job.training, PreparedData.open(paths)
    assert training is not None
    task = task_of(job)
    order = EpochOrder(
        prepared.lengths("train"),
        training.batch,
        0,
        training.seed,
        task.encoding.widths(prepared, "train"),
        grouped=False,
    )
    rows = read_lines(Path(job.dataset.uri.removeprefix("file://")) / "train.jsonl")  # type: ignore[union-attr]
    source, picked = prepared.split("train")["row"], []
    for epoch in range(-(-training.max_steps // order.steps)):
        order.start_at(epoch)
        picked += [rows[source[pick.row]] for micro in order for pick in micro]
    batch, recorded = training.batch, Losses()
    trainer = trl.DPOTrainer(
        model=model,
        args=trl.DPOConfig(
            output_dir=str(folder),
            beta=job.preference.beta,
            max_length=None,
            per_device_train_batch_size=batch.micro_batch_size,
            per_device_eval_batch_size=5,
            gradient_accumulation_steps=batch.gradient_accumulation,
            max_steps=training.max_steps,
            train_sampling_strategy="sequential",
            learning_rate=training.learning_rate,
            lr_scheduler_type="linear",
            adam_epsilon=1e-5,
            max_grad_norm=training.max_grad_norm,
            weight_decay=0.0,
            seed=training.seed,
            gradient_checkpointing=False,
            precompute_ref_log_probs=True,
            use_cpu=True,
            bf16=False,
            logging_steps=1,
            logging_first_step=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(picked[: training.max_steps * batch.global_batch_size]),
        eval_dataset=Dataset.from_list(
            read_lines(Path(job.dataset.uri.removeprefix("file://")) / "validation.jsonl")  # type: ignore[union-attr]
        ),
        processing_class=AutoTokenizer.from_pretrained(job.model.uri.removeprefix("file://")),
        callbacks=[recorded],
    )
    trainer.train()
    return recorded.found, trainer


@pytest.mark.parametrize(
    ("family", "talk", "beta"),
    [("llama", False, 0.1), ("gpt2", True, 0.3)],
    ids=["texts", "conversations"],
)
def test_losses_weights_and_rewards_are_those_of_trl(family, talk, beta, tmp_path, paths):
    for seed, (split, count) in enumerate({"train": 40, "validation": 10}.items()):
        write_lines(tmp_path / "data" / f"{split}.jsonl", pairs(count, seed, talk=talk))
    model = write_decoder(tmp_path / "model", family)
    job = job_on(model, tmp_path / "data", predict=None, preference={"beta": beta})
    trained(job, paths)
    theirs, trainer = by_trl(job, paths, tmp_path / "trl", AutoModelForCausalLM.from_pretrained(model))
    assert losses(paths) == pytest.approx(theirs, rel=1e-4)
    assert losses(paths)[0] == pytest.approx(math.log(2), rel=1e-6)
    assert losses(paths)[-1] < 0.95 * math.log(2)
    found = AutoModelForCausalLM.from_pretrained(paths.model).state_dict()
    for name, weight in trainer.model.state_dict().items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=2e-5, msg=name)
    measured, expected = evaluate(job, paths, NoProgress())["evaluate"], trainer.evaluate()
    for name in ("loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected"):
        assert measured[name] == pytest.approx(expected[f"eval_{name}"], rel=1e-3, abs=1e-5), name
    last_evaluation = [line for line in read_lines(paths.history) if "eval_loss" in line][-1]
    assert last_evaluation["eval_rewards/margins"] == pytest.approx(measured["rewards/margins"], rel=1e-4)


@pytest.mark.skipif(not DATA.is_dir(), reason=WITHOUT_DATA)
def test_real_answers_are_preferred_to_their_shuffled_form(tmp_path, paths):
    """Word frequencies cannot tell the two apart; losses equal trl's."""
    draw, rows = random.Random(3), []
    for row in real_rows("instruct/train.jsonl", 900):
        reply = row["output"].split()
        if 5 <= len(reply) <= 40:
            prompt = f"{row['instruction']} {row['input']} => "
            rows.append(
                {"prompt": prompt, "chosen": " ".join(reply), "rejected": " ".join(draw.sample(reply, len(reply)))}
            )
    assert len(rows) > 500
    write_lines(tmp_path / "data" / "train.jsonl", rows[:-60])
    write_lines(tmp_path / "data" / "validation.jsonl", rows[-60:])
    known = common_words(f"{row['prompt']} {row['chosen']}" for row in rows)
    model = write_decoder(tmp_path / "model", words=known)
    job = job_on(model, tmp_path / "data", steps=24, predict=None, training={"learning_rate": 1e-2})
    trained(job, paths)
    theirs, _ = by_trl(job, paths, tmp_path / "trl", AutoModelForCausalLM.from_pretrained(model))
    assert losses(paths) == pytest.approx(theirs, rel=1e-3)
    measured = evaluate(job, paths, NoProgress())["evaluate"]
    assert measured["rewards/accuracies"] > 0.75
    samples = json.loads((paths.root / "samples.json").read_text(encoding="utf-8"))
    margins = [each["score"] for each in samples]
    assert margins == sorted(margins)
    assert margins[0] < measured["rewards/margins"]
    assert samples[0]["text"] == [rows[-60:][samples[0]["row"]]["prompt"]]


def test_lora_is_compared_with_the_model_without_it_as_trl_does(llama, data, tmp_path, paths):
    peft = pytest.importorskip("peft")
    from finetune_trainer.models.adapters import adapt

    adapter = {"method": "lora", "rank": 4, "alpha": 8, "dropout": 0.0}
    job = job_on(llama, data, predict=None, training={"adapter": adapter, "learning_rate": 1e-2})
    trained(job, paths)
    start = task_of(job).head.build_model(job, PreparedData.open(paths).facts)
    assert job.training is not None
    assert job.training.adapter is not None
    adapted = adapt(start, job.training.adapter, job)
    # trl turns dropout off, that of the adapter too; a plan leaves it out by default (test_plan_adapters.py).
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, target_modules=list(adapted.layers))
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(llama), config)
    same = {f"base_model.model.{name}": value for name, value in start.state_dict().items()}
    assert not model.load_state_dict(same, strict=True).missing_keys
    theirs, trainer = by_trl(job, paths, tmp_path / "trl", model)
    assert losses(paths) == pytest.approx(theirs, rel=1e-4)
    assert losses(paths)[-1] < 0.95 * math.log(2)
    found = AutoModelForCausalLM.from_pretrained(paths.model).state_dict()
    for name, weight in trainer.model.merge_and_unload().state_dict().items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=2e-5, msg=name)
    assert (paths.adapter / "adapter_model.safetensors").exists()


# ------------------------------------------------------------------------------------------------------- the reference


def schedule(**changes: Any) -> dict[str, Any]:
    return {"checkpoints": {"every_steps": 3, "keep": 5, **changes}}


def stopped_after(job: TrainerJob, paths: JobPaths, step: int) -> None:
    """Train whole, then delete all that a run killed after the checkpoint of `step` would not have written."""
    trained(job, paths)
    for folder in paths.checkpoints.glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            for file in sorted(folder.rglob("*"), reverse=True):
                file.unlink() if file.is_file() else file.rmdir()
            folder.rmdir()


@pytest.mark.parametrize("kept", [True, False], ids=["its answers are kept", "its answers are lost"])
def test_resumed_run_is_compared_with_its_initial_reference(llama, data, paths, kept):
    job = job_on(llama, data, predict=None, training=schedule())
    stopped_after(job, paths, 6)
    whole, model = losses(paths), (paths.model / "model.safetensors").read_bytes()
    (reference,) = paths.checkpoints.glob("reference-*.npz")
    written = reference.stat().st_mtime_ns
    if not kept:
        reference.unlink()
    train_here(job, paths)
    assert losses(paths) == whole
    assert (paths.model / "model.safetensors").read_bytes() == model
    (again,) = paths.checkpoints.glob("reference-*.npz")
    assert (again.stat().st_mtime_ns == written) == kept


def test_a_run_does_not_go_on_from_another_reference_or_another_beta(llama, data, tmp_path, paths):
    job = job_on(llama, data, predict=None, training=schedule())
    stopped_after(job, paths, 6)
    other = job.model_copy(update={"preference": Preference(beta=0.2)})
    with pytest.raises(StageError, match="preference"):
        train_here(other, paths)
    model = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        model.lm_head.weight += 0.1
    before = {path.name: path.read_bytes() for path in llama.glob("*.safetensors")}
    try:
        model.save_pretrained(llama)
        with pytest.raises(StageError, match="reference_weights"):
            train_here(job, paths)
    finally:
        for name, content in before.items():
            (llama / name).write_bytes(content)


def test_reference_is_computed_only_for_rows_of_the_steps(llama, data, paths):
    job = job_on(llama, data, steps=2, predict=None)
    trained(job, paths)
    (file,) = paths.checkpoints.glob("reference-*.npz")
    with np.load(file) as kept:
        computed = np.isfinite(kept["train"]).all(axis=1)
        assert computed.sum() == 16
        assert np.isfinite(kept["validation"]).all()


def test_dropout_is_off_on_both_sides(tmp_path, data, paths):
    """With dropout the untrained model would differ from itself."""
    folder = write_decoder(tmp_path / "gpt2", "gpt2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5})
    )
    job = job_on(folder, data, steps=1, predict=None)
    trained(job, paths)
    assert losses(paths) == pytest.approx([math.log(2)], rel=1e-6)


# ------------------------------------------------------------------------------------------------------------- results


def test_model_writes_the_preferred_answers_and_its_card_runs(llama, data, paths, capsys):
    inference = {"device": "cpu", "batch_tokens": 512, "columns": ["prompt"]}
    job = job_on(llama, data, steps=60, predict=inference, generation={"max_new_tokens": 4})
    trained(job, paths)
    measured = evaluate(job, paths, NoProgress())["evaluate"]
    assert (measured["rows"], measured["split"]) == (12, "test")
    assert measured["rewards/accuracies"] == 1.0
    assert measured["rewards/margins"] == pytest.approx(
        measured["rewards/chosen"] - measured["rewards/rejected"], rel=1e-9
    )
    predict(job, paths, NoProgress())
    rows = predictions(paths)
    assert [each["prompt"] for each in rows] == [row["prompt"] for row in pairs(12, 2)]
    assert all("hears" not in each["generated_text"] for each in rows)
    assert sum("sees" in each["generated_text"] for each in rows) > 6
    card = run_card(job, paths)
    assert "| rewards/margins |" in card


def test_prompts_alone_are_answered(llama, data, tmp_path, paths):
    write_lines(tmp_path / "asked" / "rows.jsonl", [{"prompt": "the cat"}, {"prompt": "a dog"}])
    dataset = {"uri": f"file://{tmp_path}/asked/rows.jsonl", "columns": {"prompt": "prompt"}}
    job = job_on(
        llama,
        data,
        steps=1,
        predict={"device": "cpu", "batch_tokens": 64, "dataset": dataset},
        generation={"max_new_tokens": 3},
    )
    trained(job, paths)
    predict(job, paths, NoProgress())
    model = AutoModelForCausalLM.from_pretrained(paths.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(paths.model)
    for text, answer in zip(("the cat", "a dog"), predictions(paths), strict=True):
        given = tokenizer(text, return_tensors="pt")
        out = model.generate(**given, max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert answer["generated_text"] == tokenizer.decode(
            out[0, given["input_ids"].shape[1] :], skip_special_tokens=True
        )


def test_a_model_that_the_job_has_not_trained_is_not_judged(llama, data, paths):
    job = task_job("preference-tuning", llama, data, COLUMNS, predict=None)
    prepare(job, paths, NoProgress())
    with pytest.raises(StageError) as caught:
        evaluate(job, paths, NoProgress())
    assert caught.value.reason == "NothingToCompare"


def test_a_pipeline_is_refused_by_name(llama, data, paths):
    pipeline = {"degree": 2, "micro_batches": 2, "schedule": "1f1b"}
    changes = {
        "strategy": {"name": "ddp", "pipeline": pipeline},
        "world": {"nodes": 1, "processes_per_node": 2, "device": "cpu", "threads_per_process": 1},
    }
    job = job_on(llama, data, predict=None, training=changes)
    assert job.training is not None
    with pytest.raises(StageError, match=r"spec\.parallelism\.pipeline\.degree.*preference-tuning") as caught:
        refuse_combinations(job, job.training)
    assert caught.value.reason == "NotCombined"
