"""Small random models of each task, and rows for their servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finetune_contract.inference_settings import Serving
from finetune_contract.layout import JobPaths
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.predict.predict import predict
from finetune_trainer.prepare.prepare import prepare
from trainer_support.served import Served, served
from trainer_support.tasks import predictions, task_job, write_decoder, write_encoder_decoder, write_lines

VOCABULARY = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "small", "grey", "dog", "run", "by", "it"]
TEXTS = [" ".join((VOCABULARY * 3)[at : at + 3 + 5 * at % 17]) for at in range(9)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "text-classification": [{"text": text} for text in TEXTS],
    "token-classification": [{"tokens": text.split()} for text in TEXTS],
    "question-answering": [{"question": "the cat saw it", "context": text} for text in TEXTS],
    "masked-lm": [{"text": f"{text} [MASK] it"} for text in TEXTS],
    "text-generation": [{"text": text} for text in TEXTS],
    "summarization": [{"source": text} for text in TEXTS],
    "translation": [{"source": text} for text in TEXTS],
}
_HEADS = {
    "token-classification": "BertForTokenClassification",
    "question-answering": "BertForQuestionAnswering",
    "masked-lm": "BertForMaskedLM",
}


def write_served_model(folder: Path, task: str, tiny_bert: Callable[..., Path]) -> Path:
    """Write a random model with the task's head; its weights are large enough for rows to differ."""
    if task == "text-generation":
        return write_decoder(folder, words=VOCABULARY)
    if task in ("summarization", "translation"):
        return write_encoder_decoder(folder, words=VOCABULARY)
    if task == "text-classification":
        return tiny_bert(folder, words=VOCABULARY, labels=("bad", "so-so", "good"), initializer_range=0.5)
    import torch
    import transformers

    tiny_bert(folder, words=VOCABULARY)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.initializer_range = 0.5
    if task == "token-classification":
        config.id2label = dict(enumerate(("O", "B-PER", "I-PER")))
        config.label2id = {name: at for at, name in config.id2label.items()}
    torch.manual_seed(3)
    getattr(transformers, _HEADS[task])(config).save_pretrained(folder)
    return folder


@contextmanager
def served_and_predicted(
    folder: Path, task: str, tiny_bert: Callable[..., Path]
) -> Iterator[tuple[Served, list[dict[str, Any]]]]:
    """Run a server of the task's model, named tiny; with it the predictions of `ROWS` by the stage predict."""
    model, rows = write_served_model(folder / "model", task, tiny_bert), ROWS[task]
    write_lines(folder / "data" / "test.jsonl", rows)
    job = task_job(task, model, folder / "data", list(rows[0]), evaluation=None, generation={"max_new_tokens": 5})
    paths = JobPaths(folder / "job")
    prepare(job, paths, NoProgress())
    predict(job, paths, NoProgress())
    serving = Serving(model_name="tiny", device="cpu", max_batch_tokens=512)
    with served(job.model_copy(update={"serving": serving}), paths) as server:
        yield server, predictions(paths)
