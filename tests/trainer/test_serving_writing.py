"""Generating models behind OpenAI's API: chat, preferences, ends of texts, and requests that share the model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.serving.fair_lock import FairLock
from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until
from trainer_support.served import Reply, Served, biased, never_ending, served
from trainer_support.tasks import write_decoder

CONVERSATION = [{"role": "system", "content": "the cat"}, {"role": "user", "content": "sees a dog"}]
LONGEST = 400


def job_of(model: Path, task: str, **changes: Any) -> TrainerJob:
    return TrainerJob.model_validate(
        {
            "name": "job",
            "task": task,
            "model": {"uri": f"file://{model}"},
            "serving": {"model_name": "tiny", "device": "cpu", "max_batch_tokens": 2048},
            "generation": {"max_new_tokens": 6},
            **changes,
        }
    )


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("decoder") / "m", positions=512)


@pytest.fixture(scope="module", params=["text-generation", "preference-tuning"])
def chatting(request: Any, decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(job_of(decoder, request.param), JobPaths(tmp_path_factory.mktemp("w") / "job")) as server:
        yield server


def events(reply: Reply) -> list[Any]:
    """Return the data of server-sent events, without the [DONE] at their end."""
    parts = reply.content.decode().strip().split("\n\n")
    assert parts[-1] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


def plainly(server: Served, tokens: int) -> Any:
    """Return the tokens that transformers' own `generate` writes after the conversation."""
    engine = server.state.engine
    given = engine.tokenizer.apply_chat_template(
        CONVERSATION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model: Any = engine.answerer.model
    ids = model.generate(
        input_ids=given["input_ids"],
        attention_mask=given["attention_mask"],
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=3,
    )
    return ids[0, given["input_ids"].shape[1] :]


def test_chat_writes_the_text_of_transformers_with_the_template(chatting: Served) -> None:
    request = {"model": "tiny", "messages": CONVERSATION, "max_tokens": 5}
    tokens = plainly(chatting, 5)
    text = chatting.state.engine.tokenizer.decode(tokens, skip_special_tokens=True)

    whole = chatting.request("/v1/chat/completions", request)
    stream = events(chatting.request("/v1/chat/completions", {**request, "stream": True}))

    assert whole.code == 200, whole.content
    choice = whole.json["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": text}
    assert whole.json["usage"]["completion_tokens"] == len(tokens)
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in stream) == text
    assert stream[0]["choices"][0]["delta"]["role"] == "assistant"
    assert stream[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


def test_text_that_may_not_go_on_ends_by_length(chatting: Served) -> None:
    with never_ending(chatting):
        whole = chatting.request("/v1/completions", {"prompt": "the cat", "max_tokens": 7})
        stream = events(chatting.request("/v1/completions", {"prompt": "the cat", "max_tokens": 7, "stream": True}))

    assert whole.json["choices"][0]["finish_reason"] == "length"
    assert whole.json["usage"]["completion_tokens"] == 7
    assert stream[-1]["choices"][0]["finish_reason"] == "length"


def test_text_that_the_model_ends_ends_by_stop(chatting: Served) -> None:
    with biased(chatting, 3, 100.0):
        whole = chatting.request("/v1/completions", {"prompt": ["the cat", "a"], "max_tokens": 7})
        stream = events(chatting.request("/v1/completions", {"prompt": "the cat", "max_tokens": 7, "stream": True}))

    assert [each["finish_reason"] for each in whole.json["choices"]] == ["stop", "stop"]
    assert whole.json["usage"]["completion_tokens"] == 2
    assert stream[-1]["choices"][0]["finish_reason"] == "stop"


def test_text_ends_before_a_stop_streamed_or_not(chatting: Served) -> None:
    with never_ending(chatting):
        text = chatting.request("/v1/completions", {"prompt": "the cat", "max_tokens": 12}).json["choices"][0]["text"]
        stop = text.split()[5]
        end = text.index(stop)
        request = {"prompt": "the cat", "max_tokens": 12, "stop": [stop, "not there"]}
        whole = chatting.request("/v1/completions", request).json
        stream = events(chatting.request("/v1/completions", {**request, "stream": True}))
        several = chatting.request("/v1/completions", {**request, "prompt": ["the cat", "a dog", "the cat"]}).json

    assert whole["choices"][0]["text"] == text[:end]
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] < 12
    assert "".join(each["choices"][0]["text"] for each in stream) == text[:end]
    assert stream[-1]["choices"][0]["finish_reason"] == "stop"
    assert [several["choices"][at]["text"] for at in (0, 2)] == [text[:end]] * 2


def test_seed_decides_the_sample_independent_of_other_rows(chatting: Served) -> None:
    request = {"prompt": "the dog", "max_tokens": 30, "temperature": 1.0}

    def text(**changes: Any) -> str:
        found: str = chatting.request("/v1/completions", {**request, **changes}).json["choices"][0]["text"]
        return found

    with never_ending(chatting):
        first, again, other = text(seed=7), text(seed=7), text(seed=8)
        beside = chatting.request("/v1/completions", {**request, "prompt": ["a cat", "the dog"], "seed": 7}).json

    assert first == again == beside["choices"][1]["text"]
    assert first != other


def test_stream_reports_its_usage_on_request(chatting: Served) -> None:
    request = {"messages": CONVERSATION, "max_completion_tokens": 5}
    usage = chatting.request("/v1/chat/completions", request).json["usage"]

    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = events(chatting.request("/v1/chat/completions", {**request, **options}))

    assert stream[-1]["choices"] == []
    assert stream[-1]["usage"] == usage
    assert all(each["usage"] is None for each in stream[:-1])


@pytest.mark.parametrize("chatting", ["text-generation"], indirect=True)
@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("completions", {"tools": [{"type": "function"}]}, "tools"),
        ("completions", {"n": 2}, "n"),
        ("completions", {"n": True}, "n"),
        ("completions", {"logprobs": 3}, "logprobs"),
        ("completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("completions", {"presence_penalty": 0.5}, "presence_penalty"),
        ("completions", {"no_such_field": 1}, "no_such_field"),
        ("completions", {"messages": CONVERSATION}, "messages"),
        ("completions", {"prompt": [1, 2]}, "prompt"),
        ("completions", {"prompt": ["a", "b"], "stream": True}, "prompt"),
        ("completions", {"stop": ["a"] * 17}, "stop"),
        ("completions", {"stop": ""}, "stop"),
        ("completions", {"stop": "\ud800"}, "stop"),
        ("completions", {"seed": 1.5}, "seed"),
        ("completions", {"stream": 1}, "stream"),
        ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ("completions", {"temperature": "hot"}, "temperature"),
        ("chat/completions", {"prompt": None, "messages": []}, "messages"),
    ],
)
def test_wrong_field_gets_an_error_in_the_shape_of_openai(
    chatting: Served, path: str, change: dict[str, Any], param: str
) -> None:
    reply = chatting.request(f"/v1/{path}", {"prompt": "the cat", "max_tokens": 2, **change})

    assert reply.code == 400
    error = reply.json["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, None)
    assert param in error["message"]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6])
def test_temperature_that_overflows_logits_writes_the_likeliest_tokens(chatting: Served, temperature: float) -> None:
    request = {"inputs": "the cat", "parameters": {"max_new_tokens": 4}}
    greedy = chatting.request("/", request)

    request["parameters"] |= {"temperature": temperature}  # type: ignore[operator]
    reply = chatting.request("/", request)

    assert (reply.code, reply.json) == (200, greedy.json)


def test_whole_numbers_may_be_written_with_a_point(chatting: Served) -> None:
    body = b'{"inputs": "the cat", "parameters": {"max_new_tokens": 4.0, "num_beams": 2.0}}'
    reply = chatting.request("/", body)
    assert (reply.code, reply.json) == (200, chatting.request("/", body.replace(b".0", b"")).json)
    assert chatting.request("/", body.replace(b"2.0", b"2.5")).code == 422


def test_message_with_an_unknown_role_is_refused(chatting: Served) -> None:
    reply = chatting.request("/v1/chat/completions", {"messages": [{"role": "tool", "content": "the cat"}]})

    assert (reply.code, reply.json["error"]["param"]) == (400, "messages")
    assert "developer, system, user, assistant" in reply.json["error"]["message"]


def test_neutral_fields_are_accepted(chatting: Served) -> None:
    neutral = {"n": 1, "tools": [], "tool_choice": "none", "logprobs": None, "presence_penalty": 0, "user": "me"}
    request = {"messages": [{"role": "developer", "content": "the cat"}, CONVERSATION[1]], "max_tokens": 3}

    reply = chatting.request("/v1/chat/completions", {**request, **neutral})

    assert reply.code == 200
    assert (
        reply.json["choices"]
        == chatting.request("/v1/chat/completions", {"messages": CONVERSATION, "max_tokens": 3}).json["choices"]
    )


def test_drawn_text_is_the_same_beside_others(chatting: Served) -> None:
    request = {"prompt": "the dog", "max_tokens": 40, "temperature": 1.0}
    with never_ending(chatting):
        alone = chatting.request("/v1/completions", request).json["choices"][0]["text"]
        found: list[str] = []

        def send(longest: int) -> None:
            reply = chatting.request("/v1/completions", {**request, "max_tokens": longest})
            found.append(reply.json["choices"][0]["text"])

        senders = [threading.Thread(target=send, args=(40 + each,)) for each in range(6)]
        for each in senders:
            each.start()
        for each in senders:
            each.join(patient(120))

    assert len(found) == 6
    assert all(text.startswith(alone) for text in found)


def test_short_requests_are_written_while_a_long_stream_is(chatting: Served) -> None:
    batcher, steps = chatting.state.batcher, []

    def step(module: Any, given: Any) -> None:
        steps.append(threading.current_thread().name)
        if len(steps) == 5:  # the long one continues when the short ones have come
            wait_until(lambda: batcher.queued == 3, "two more requests are there")

    replies: list[Reply] = []

    def send(**fields: Any) -> None:
        replies.append(chatting.request("/v1/completions", {"prompt": "the cat", "max_tokens": 3, **fields}))

    long = threading.Thread(target=send, kwargs={"max_tokens": LONGEST, "stream": True})
    short = [threading.Thread(target=send, kwargs={"stream": each}) for each in (False, True)]
    hook = chatting.state.engine.answerer.model.register_forward_pre_hook(step)
    try:
        with never_ending(chatting):
            long.start()
            wait_until(lambda: len(steps) == 5, "the long text is begun")
            for each in short:
                each.start()
            for each in (long, *short):
                each.join(patient(240))
    finally:
        hook.remove()

    assert [each.code for each in replies] == [200] * 3
    assert len(steps) == LONGEST + 6
    assert set(steps[100:]) == {steps[0]}


def test_turns_go_round() -> None:
    turns, order = FairLock(), []
    inside, may_go = threading.Event(), threading.Event()

    def write(name: str) -> None:
        with turns.taken():
            for _ in range(3):
                order.append(name)
                inside.set()
                may_go.wait(patient(30))
                turns.hand_on()

    writers = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    writers[0].start()
    inside.wait(patient(30))
    writers[1].start()
    wait_until(lambda: len(turns._waiting) == 1, "the second waits")
    may_go.set()
    for each in writers:
        each.join(patient(30))

    assert "".join(order) == "ababab"


def test_adapter_without_its_base_is_refused_with_a_hint(decoder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(decoder)
    adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(base, adapter).save_pretrained(tmp_path / "adapter")

    with (
        pytest.raises(StageError, match="is an adapter") as refused,
        served(job_of(tmp_path / "adapter", "text-generation"), JobPaths(tmp_path / "w" / "job")),
    ):
        pass
    assert "model/ of the run" in refused.value.hint
