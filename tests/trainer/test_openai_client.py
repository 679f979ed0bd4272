"""The client of OpenAI, the package openai, against a model that writes texts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from finetune_contract.layout import METRICS_PATH, REQUESTS_METRIC, JobPaths
from finetune_contract.trainer_job import TrainerJob
from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until
from trainer_support.served import Served, never_ending, served
from trainer_support.tasks import write_decoder

TOKEN = "secret"
NAME = "tiny"
PROMPT = "the cat"
MESSAGES: list[Any] = [{"role": "system", "content": "the cat"}, {"role": "user", "content": "sees a dog"}]
QUEUE = 4
LONGEST = 400


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> TrainerJob:
    model = write_decoder(tmp_path_factory.mktemp("decoder") / "m", positions=512)
    serving = {"model_name": NAME, "device": "cpu", "max_batch_tokens": 2048, "max_queue": QUEUE}
    source = {"name": "job", "task": "text-generation", "model": {"uri": f"file://{model}"}}
    return TrainerJob.model_validate({**source, "serving": serving, "generation": {"max_new_tokens": 6}})


@pytest.fixture(scope="module")
def server(job: TrainerJob, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(job, JobPaths(tmp_path_factory.mktemp("w") / "job")) as running:
        yield running


def connected(server: Served, token: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=token, timeout=patient(60), max_retries=0)


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with connected(server) as found:
        yield found


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]


def test_stream_of_a_completion_is_the_whole_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=7, temperature=0)
    stream = list(
        client.completions.create(
            model=NAME,
            prompt=PROMPT,
            max_tokens=7,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    choice = whole.choices[0]
    assert choice.text
    assert "".join(each.choices[0].text for each in stream if each.choices) == choice.text
    assert [each.choices[0].finish_reason for each in stream if each.choices][-1] == choice.finish_reason
    assert stream[-1].usage == whole.usage


def test_stream_of_a_chat_is_the_whole_message(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=NAME, messages=MESSAGES, max_completion_tokens=5, temperature=0)
    stream = list(
        client.chat.completions.create(
            model=NAME,
            messages=MESSAGES,
            max_completion_tokens=5,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    message = whole.choices[0].message
    assert message.role == "assistant"
    assert message.content
    choices = [each.choices[0] for each in stream if each.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == message.content
    assert choices[0].delta.role == "assistant"
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    assert stream[-1].usage == whole.usage


def test_text_ends_before_a_stop(client: openai.OpenAI) -> None:
    text = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, temperature=0).choices[0].text
    stop = text.split()[-1]

    found = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, temperature=0, stop=[stop])

    assert found.choices[0].text == text[: text.index(stop)]
    assert found.choices[0].finish_reason == "stop"


def test_several_prompts_get_a_choice_each(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "a dog", PROMPT]

    found = client.completions.create(model=NAME, prompt=prompts, max_tokens=4, temperature=0).choices

    alone = [client.completions.create(model=NAME, prompt=each, max_tokens=4, temperature=0) for each in prompts]
    assert [each.index for each in found] == [0, 1, 2]
    assert [each.text for each in found] == [each.choices[0].text for each in alone]


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"n": 2}, "n"), ({"max_tokens": -1}, "max_tokens"), ({"logprobs": 3}, "logprobs"), ({"stop": [""]}, "stop")],
)
def test_refused_field_is_named(client: openai.OpenAI, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt=PROMPT, **changes)

    assert caught.value.param == field
    assert field in caught.value.message


def test_tools_are_refused(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": {}}}

    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(model=NAME, messages=MESSAGES, tools=[tool])


def test_wrong_token_is_an_authentication_error(job: TrainerJob, tmp_path: Path) -> None:
    with served(job, JobPaths(tmp_path / "job"), TOKEN) as guarded:
        with connected(guarded, "wrong") as stranger, pytest.raises(openai.AuthenticationError) as caught:
            stranger.models.list()
        with connected(guarded, TOKEN) as known:
            assert [model.id for model in known.models.list()] == [NAME]

    assert caught.value.code == "invalid_api_key"


def test_other_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt=PROMPT)

    assert "other" in caught.value.message
    assert caught.value.param == "model"


@contextmanager
def full(server: Served) -> Iterator[None]:
    """Keep the queue full while the block runs."""
    with server.held(*({"inputs": PROMPT} for _ in range(QUEUE))) as (entered, _):
        assert entered.wait(patient(60))
        wait_until(lambda: server.state.batcher.queued == QUEUE, "the queue is full")
        yield


def refusals(server: Served) -> float:
    """Return the number of completions that were refused with 429."""
    families = text_string_to_metric_families(server.request(METRICS_PATH).content.decode())
    samples = [sample for family in families for sample in family.samples]
    wanted = {"path": "/v1/completions", "code": "429"}
    return sum(
        sample.value
        for sample in samples
        if sample.name == f"{REQUESTS_METRIC}_total" and wanted.items() <= sample.labels.items()
    )


def test_full_queue_is_a_rate_limit_error(server: Served, client: openai.OpenAI) -> None:
    with full(server), pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model=NAME, prompt=PROMPT, max_tokens=2)

    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert caught.value.code == "rate_limit_exceeded"


def test_client_tries_again_after_a_full_queue(server: Served, client: openai.OpenAI) -> None:
    patiently = client.with_options(max_retries=10)
    before = refusals(server)
    with ThreadPoolExecutor(1) as pool:
        with full(server):
            answer = pool.submit(patiently.completions.create, model=NAME, prompt=PROMPT, max_tokens=2)
            wait_until(lambda: refusals(server) > before, "the client was refused")
        found = answer.result(patient(60))

    assert found.choices[0].text


def test_stream_that_a_client_closes_leaves_the_queue(server: Served, client: openai.OpenAI) -> None:
    written: list[int] = []
    hook = server.state.engine.answerer.model.register_forward_hook(lambda *_: written.append(1))
    with never_ending(server):
        with client.completions.create(model=NAME, prompt=PROMPT, max_tokens=LONGEST, stream=True) as stream:
            next(iter(stream))
        wait_until(lambda: server.state.batcher.queued == 0, "the closed stream has left the queue")
    hook.remove()

    assert 0 < len(written) < LONGEST


def test_asynchronous_requests_get_the_same_texts(server: Served, client: openai.OpenAI) -> None:
    prompts = [PROMPT, "a dog", "sees a dog"]

    async def texts() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=patient(60)) as others:
            create = others.completions.create
            found = await asyncio.gather(
                *(create(model=NAME, prompt=each, max_tokens=4, temperature=0) for each in prompts)
            )
            return [each.choices[0].text for each in found]

    alone = [client.completions.create(model=NAME, prompt=each, max_tokens=4, temperature=0) for each in prompts]
    assert asyncio.run(texts()) == [each.choices[0].text for each in alone]
