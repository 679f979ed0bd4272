"""A chat template is a program by the model's author: it gets a bounded time, memory and length of text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.tasks.chat_template import prompt_turns, tokens_of
from finetune_trainer.tasks.conversations import Conversation
from trainer_support.served import served
from trainer_support.tasks import task_job, training_of, word_tokenizer, write_decoder, write_lines

FRIENDLY = "{% for m in messages %}{{ m.content }} {% endfor %}"
ALLOCATE = "{{ ('cat' * 10 ** 10) | length }}"
HOSTILE = {
    "repetition": ALLOCATE,
    "nested loops": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "concatenation": "{% set n = namespace(x='cat') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a long text": "{{ 'cat ' * 10 ** 6 }}",
}


def talk(content: str) -> Conversation:
    return Conversation(({"role": "user", "content": content},))


def tokenizer_with(template: str) -> Any:
    tokenizer = word_tokenizer(["cat", "dog"])
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("attack", HOSTILE)
def test_template_that_exceeds_its_limits_is_the_models_fault(attack: str) -> None:
    tokenizer = tokenizer_with(f"{{% if messages[0].content == 'dog' %}}{HOSTILE[attack]}{{% endif %}}{FRIENDLY}")
    assert prompt_turns(tokenizer, talk("cat")).text == "cat "
    with pytest.raises(StageError) as caught:
        prompt_turns(tokenizer, talk("dog"))
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.MODEL, "ChatTemplateExceedsLimits")
    assert prompt_turns(tokenizer, talk("cat")).text == "cat "


def test_endless_recursion_of_a_template_refuses_the_conversation() -> None:
    tokenizer = tokenizer_with("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")
    with pytest.raises(StageError, match="recursion") as caught:
        tokens_of(tokenizer, talk("cat"), learnt=False)
    assert caught.value.reason == "ConversationRefused"


def test_forked_process_renders_beside_its_parent() -> None:
    tokenizer = tokenizer_with(FRIENDLY)
    assert prompt_turns(tokenizer, talk("cat")).text == "cat "
    process = os.fork()
    if process == 0:
        texts = {prompt_turns(tokenizer, talk(f"cat {number}")).text == f"cat {number} " for number in range(50)}
        os._exit(texts != {True})
    for number in range(50):
        assert prompt_turns(tokenizer, talk(f"dog {number}")).text == f"dog {number} "
    assert os.waitpid(process, 0)[1] == 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model whose template allocates 30 GB once somebody says dog."""
    folder = write_decoder(tmp_path / "m", positions=512)
    tokenizer_with(f"{{% if 'dog' in messages[-1].content %}}{ALLOCATE}{{% endif %}}{FRIENDLY}").save_pretrained(folder)
    return folder


def test_prepare_fails_with_a_template_that_exceeds_its_limits(model: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word}]}
        for word in ("cat", "cat", "dog", "cat")
    ]
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "train.jsonl", rows)
    job = task_job(
        "text-generation", model, tmp_path / "data", ["messages"], training=training_of(steps=1), predict=None
    )
    with pytest.raises(StageError) as caught:
        prepare(job, JobPaths(tmp_path / "w" / "job"), NoProgress())
    assert caught.value.reason == "ChatTemplateExceedsLimits"


def test_server_refuses_only_the_request_that_exceeds_the_limits(model: Path, tmp_path: Path) -> None:
    job = TrainerJob.model_validate(
        {
            "name": "tiny",
            "task": "text-generation",
            "model": {"uri": f"file://{model}"},
            "serving": {"model_name": "tiny", "device": "cpu", "max_batch_tokens": 2048},
            "generation": {"max_new_tokens": 2},
        }
    )
    with served(job, JobPaths(tmp_path / "w" / "job")) as server:
        answers = [
            server.request("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": word}]})
            for word in ("cat", "dog", "cat")
        ]
    assert [answer.code for answer in answers] == [200, 400, 200]
    assert "The model's chat template took more for a conversation than any should" in answers[1].content.decode()
