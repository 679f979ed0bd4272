"""Jobs of any task on a tiny model, and their stages in this process."""

from __future__ import annotations

import gc
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob
from suite_plugins.shared_folder import DATA as DATA
from suite_plugins.shared_folder import missing

INFERENCE: dict[str, Any] = {"device": "cpu", "batch_tokens": 512}


def training_of(
    *, steps: int, batch: int = 16, micro: int = 8, learning_rate: float = 3e-3, threads: int = 2, **changes: Any
) -> dict[str, Any]:
    """Return settings for one process that a plain loop can reproduce. `batch`: rows of a step, `micro` at a time;
    `changes`: fields that replace those here.
    """
    return {
        "max_steps": steps,
        "steps_per_epoch": 10,
        "learning_rate": learning_rate,
        "scheduler": "linear",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optimizer": "adamw",
        "seed": 11,
        "label_smoothing": 0.0,
        "precision": "fp32",
        "strategy": {"name": "single"},
        "batch": {
            "global_batch_size": batch,
            "micro_batch_size": micro,
            "gradient_accumulation": batch // micro,
            "data_parallel": 1,
        },
        "world": {"nodes": 1, "processes_per_node": 1, "device": "cpu", "threads_per_process": threads},
        "checkpoints": {"every_steps": 1000, "keep": 2},
        **changes,
    }


def task_job(
    task: str,
    model: Path | str,
    data: Path | str,
    columns: Iterable[str] | dict[str, str],
    *,
    training: dict[str, Any] | None = None,
    **changes: Any,
) -> TrainerJob:
    """Return a job. `model`, `data`: a path or a URI; `columns`: names by role, or roles that are also the names;
    `changes`: further sections.
    """
    named = columns if isinstance(columns, dict) else {role: role for role in columns}
    body: dict[str, Any] = {
        "name": "job",
        "task": task,
        "model": {"uri": model if isinstance(model, str) else f"file://{model}"},
        "dataset": {"uri": data if isinstance(data, str) else f"file://{data}", "columns": named},
        "training": training,
        "evaluation": INFERENCE,
        "predict": INFERENCE,
        "seed": 11,
    }
    if task in ("text-generation", "preference-tuning"):
        body["generation"] = {"max_new_tokens": 64}  # the small decoders have 128 positions
    return TrainerJob.model_validate({**body, **changes})


def train_here(job: TrainerJob, paths: JobPaths, **how: Any) -> None:
    """Train in this process: strategy single only, and without the additions of `__main__`, as start-up is the slowest
    part of a stage. `how`: further arguments of `train`.
    """
    from finetune_trainer.core.distributed import ProcessWorld
    from finetune_trainer.core.interruption import Interruption
    from finetune_trainer.core.progress import NoProgress
    from finetune_trainer.training.run import train

    freeze_heap()
    train(job, paths, NoProgress(), world=ProcessWorld(), deepspeed=None, interruption=Interruption(), **how)


@cache
def freeze_heap() -> None:
    """Exempt current imports from garbage collection: each training collects its garbage, and a search of the
    libraries' objects takes longer than the steps of a tiny model.
    """
    gc.collect()
    gc.freeze()


def trained(job: TrainerJob, paths: JobPaths, **how: Any) -> TrainerJob:
    """Run the stages prepare and train, and return the job; `how`: further arguments of `train`."""
    from finetune_trainer.core.progress import NoProgress
    from finetune_trainer.prepare.prepare import prepare

    prepare(job, paths, NoProgress())
    train_here(job, paths, **how)
    paths.state.mkdir(exist_ok=True)
    (paths.state / "train.json").write_text("{}")
    return job


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read lines written by `write_lines`."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def predictions(paths: JobPaths) -> list[dict[str, Any]]:
    """Read the output of the stage predict."""
    return read_lines(paths.predictions_jsonl)


def lines_with(paths: JobPaths, figure: str) -> list[dict[str, Any]]:
    """Return the lines of the history that have `figure`."""
    return [line for line in read_lines(paths.history) if figure in line]


def losses(paths: JobPaths) -> list[float]:
    """Return the loss of each training step."""
    return [line["loss"] for line in lines_with(paths, "loss")]


def largest_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return the largest difference over all elements of tensors with the same names."""
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


CARD_TEXTS = ("a text", "a text with names in it", "first text", "It is on the table.", "A long text.", "This is ")
"""Texts in the model cards of tasks, except those that continue a text."""


def run_card(job: TrainerJob, paths: JobPaths) -> str:
    """Run the Python lines of the model card, unchanged and with 800 further words of input; return the card."""
    card = (paths.model / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert code is not None
    lines = code[1].replace(repr(f"{job.name}/model"), repr(str(paths.model)))
    exec(lines, {})
    if job.task not in ("text-generation", "preference-tuning"):
        quoted = next(text for text in sorted(CARD_TEXTS, key=len, reverse=True) if f'"{text}' in lines)
        # After the text, as a mask must stay within the model's input.
        end = lines.index('"', lines.index(f'"{quoted}') + 1)
        exec(f"{lines[:end]}{' the cat sees' * 267}{lines[end:]}", {})
    return card


WORDS = [
    "the",
    "cat",
    "dog",
    "bird",
    "sees",
    "hears",
    "finds",
    "a",
    "house",
    "tree",
    "river",
    "and",
    "then",
    "sleeps",
    ".",
]
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


WITHOUT_DATA = missing(DATA)


def real_rows(name: str, most: int) -> list[dict[str, Any]]:
    """Return the first rows of a file below `DATA`."""
    with (DATA / name).open(encoding="utf-8") as file:
        return [json.loads(line) for line, _ in zip(file, range(most), strict=False)]


def common_words(texts: Iterable[str], most: int = 2000) -> list[str]:
    """Return the most frequent words, split at blanks, without those that every tokenizer here has."""
    counts = Counter(word for text in texts for word in text.split())
    return [word for word, _ in counts.most_common(most) if word not in SPECIAL]


def word_tokenizer(words: Sequence[str] = WORDS, *, ends: bool = False) -> Any:
    """Return a fast tokenizer of words, with a chat template; `ends`: True to append the end token to each text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: at for at, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 3)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[4:],
    )
    fast.chat_template = TEMPLATE
    return fast


def texts(count: int, seed: int, most: int = 20) -> list[dict[str, Any]]:
    """Return sentences in which a noun always follows an article."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        words: list[str] = []
        while len(words) < draw.randint(2, most):
            words += ["the", draw.choice(["cat", "dog", "bird"]), draw.choice(["sees", "hears", "finds"])]
        rows.append({"text": " ".join(words)})
    return rows


def write_decoder(
    folder: Path, family: str = "llama", positions: int = 128, words: Sequence[str] = WORDS, **config: Any
) -> Path:
    """Write a random decoder of 2 layers that knows `words`; families llama, gpt2, qwen3, mistral. `config`: further
    fields of its config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = word_tokenizer(words)
    torch.manual_seed(5)
    sizes: dict[str, Any] = {
        "llama": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
        "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    }
    sizes["qwen3"] = {**sizes["llama"], "num_key_value_heads": 2, "tie_word_embeddings": True}
    sizes["mistral"] = {**sizes["llama"], "num_key_value_heads": 2}
    whole = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        max_position_embeddings=positions,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
        **sizes[family],
        **config,
    )
    AutoModelForCausalLM.from_config(whole).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_encoder_decoder(folder: Path, family: str = "t5", words: Sequence[str] = WORDS) -> Path:
    """Write a random encoder and decoder of 2 layers each that know `words`; families t5, bart."""
    import torch
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    tokenizer = word_tokenizer(words, ends=True)
    torch.manual_seed(5)
    sizes: dict[str, Any] = {
        "t5": {"d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
        "bart": {
            **{
                f"{half}_{size_name}": size for half in ("encoder", "decoder") for size_name, size in BART_SIZES.items()
            },
            **{"d_model": 48, "max_position_embeddings": 64, "dropout": 0.0},
            **{"bos_token_id": 2, "forced_eos_token_id": None},
        },
    }
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        pad_token_id=0,
        eos_token_id=3,
        decoder_start_token_id=0,
        **sizes[family],
    )
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


BART_SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 96}


def byte_tokenizer(template: str, special: Sequence[str], *, end: str, begin: str | None = None) -> Any:
    """Return a fast tokenizer with a token for each byte and for each text of `special`, and a chat template. `begin`:
    the token that it puts before each text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: at for at, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if begin is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, vocabulary[begin])]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=end, bos_token=begin, additional_special_tokens=[*special]
    )
    fast.chat_template = template
    return fast


def write_byte_decoder(folder: Path, tokenizer: Any) -> Path:
    """Write a random Llama of 2 layers with a tokenizer of `byte_tokenizer`."""
    write_decoder(folder, words=[str(at) for at in range(len(tokenizer))], positions=1024)
    for file in folder.glob("token*"):
        file.unlink()
    tokenizer.save_pretrained(folder)
    return folder
