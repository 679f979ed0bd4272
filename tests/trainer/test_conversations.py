"""Conversations: the learnt text is that of the chat template of plain transformers, and replies end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from finetune_contract.inference_settings import Generation
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.predict.predict import predict
from finetune_trainer.prepare.check import check
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.tasks.chat_template import reply_end
from finetune_trainer.tasks.task_protocol import Coding
from finetune_trainer.tasks.text_generation import text_generation
from finetune_trainer.tasks.writing import DecoderWriter, ends
from trainer_support.tasks import (
    byte_tokenizer,
    predictions,
    task_job,
    trained,
    training_of,
    word_tokenizer,
    write_byte_decoder,
    write_decoder,
    write_lines,
)

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin|>")
_TURNS = (
    "{%- if tools %}<|im_start|>system\nTOOLS {{ tools | tojson }}<|im_end|>{{ '\n' }}{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role + '\n' }}"
    "{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{- m.content or '' }}"
    "{%- for call in m.tool_calls or [] %}CALL {{ call.function.name }} ARGUMENTS{% endfor %}"
    "{{- '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>{{ 'assistant\n' }}{% endif %}"
)
WRITES_OBJECTS = _TURNS.replace("ARGUMENTS", "{{ call.function.arguments | tojson }}")
WRITES_TEXTS = _TURNS.replace("ARGUMENTS", "{{ '' + call.function.arguments }}")
WRITES_BOTH = _TURNS.replace(
    "ARGUMENTS",
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}",
)
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": {"type": "object"}}}
    for name in ("pay", "weather")
]


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def talk(name: str, arguments: Any, **further: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": "Grüße, do it"}, call(name, arguments)]
    result = [{"role": "tool", "content": "done"}, {"role": "assistant", "content": "It is done."}]
    return {"messages": [*said, *result], "tools": TOOLS, **further}


def chat_tokenizer(template: str = WRITES_BOTH, **settings: Any) -> Any:
    return byte_tokenizer(template, SPECIAL, end="<|endoftext|>", **settings)


def prepared_texts(model: Path, data: Path, paths: Any, **settings: Any) -> tuple[list[str], list[str]]:
    """Return the text of each prepared train row, and the part of it that is learnt."""
    job = task_job(
        "text-generation", model, data, ["messages"], training=training_of(steps=1), predict=None, **settings
    )
    prepare(job, paths, NoProgress())
    tokenizer, prepared = AutoTokenizer.from_pretrained(model), PreparedData.open(paths)
    rows = prepared.features("train", range(prepared.facts.splits["train"].rows))
    return (
        [tokenizer.decode(row["input_ids"]) for row in rows],
        [tokenizer.decode([token for token in row["labels"] if token >= 0]) for row in rows],
    )


def written(tmp_path: Path, rows: list[dict[str, Any]], form: str = "jsonl") -> Path:
    folder = tmp_path / form
    folder.mkdir()
    for split in ("train", "validation"):
        if form == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
        else:
            write_lines(folder / f"{split}.jsonl", rows)
    return folder


# ------------------------------------------------------------------------------------------------------ calls of tools


ROWS = [talk("pay", {"amount": 0, "of": {"kind": None}}), talk("weather", {"city": "Köln", "days": [1, 2]})]


@pytest.mark.parametrize("template", [WRITES_OBJECTS, WRITES_BOTH])
def test_calls_are_learnt_with_the_arguments_that_their_row_has(tmp_path, paths, template):
    tokenizer = chat_tokenizer(template)
    model = write_byte_decoder(tmp_path / "model", tokenizer)
    learnt, replies = prepared_texts(model, written(tmp_path, ROWS), paths)
    # Plain transformers, from the rows as they are in the file.
    expected = [tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False) for row in ROWS]
    assert learnt == expected
    assert 'CALL pay {"amount": 0, "of": {"kind": null}}<|im_end|>' in learnt[0]
    assert replies[1] == 'CALL weather {"city": "Köln", "days": [1, 2]}<|im_end|>\nIt is done.<|im_end|>\n'
    assert learnt[0].startswith("<|im_start|>system\nTOOLS [")


def test_parquet_gives_the_same_text_where_nothing_is_null(tmp_path, paths):
    rows = [talk("pay", {"amount": 0}), talk("weather", {"city": "Köln", "days": [1, 2]})]
    tokenizer = chat_tokenizer()
    learnt, _ = prepared_texts(
        write_byte_decoder(tmp_path / "model", tokenizer), written(tmp_path, rows, "parquet"), paths
    )
    assert learnt == [
        tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False) for row in rows
    ]


@pytest.mark.parametrize("given", [{"amount": 7}, '{"amount": 7}'], ids=["object", "text"])
@pytest.mark.parametrize("template", [WRITES_OBJECTS, WRITES_TEXTS, WRITES_BOTH], ids=["objects", "texts", "both"])
def test_arguments_are_given_as_the_template_expects_them(given, template):
    rows = {"messages": [talk("pay", given)["messages"]]}
    found = text_generation().encoding.encode(rows, [True], Coding(chat_tokenizer(template), 900, 0, "llama"))
    assert 'CALL pay {"amount": 7}<|im_end|>' in chat_tokenizer(template).decode(found.features["input_ids"][0])


def test_a_row_has_its_own_thoughts_tools_and_arguments_of_the_template(tmp_path, paths):
    thought = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    rows = [
        {"messages": [{"role": "user", "content": "2+2"}, thought], "tools": json.dumps(TOOLS[:1])},
        {
            "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
            "chat_template_kwargs": {"mood": "GLAD"},
        },
    ]
    tokenizer = chat_tokenizer("{{ mood }}" + WRITES_BOTH)
    learnt, _ = prepared_texts(write_byte_decoder(tmp_path / "model", tokenizer), written(tmp_path, rows), paths)
    assert learnt == [
        tokenizer.apply_chat_template(rows[0]["messages"], tools=TOOLS[:1], tokenize=False),
        tokenizer.apply_chat_template(rows[1]["messages"], mood="GLAD", tokenize=False),
    ]
    assert "<think>two and two</think>4<|im_end|>" in learnt[0]
    assert learnt[1].startswith("GLAD<|im_start|>")


def test_conversations_may_be_json_text_of_a_csv_file(tmp_path, paths):
    (tmp_path / "csv").mkdir()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    quoted = json.dumps(messages).replace('"', '""')
    for split in ("train", "validation"):
        (tmp_path / "csv" / f"{split}.csv").write_text(f'messages\n"{quoted}"\n', encoding="utf-8")
    tokenizer = chat_tokenizer()
    learnt, _ = prepared_texts(write_byte_decoder(tmp_path / "model", tokenizer), tmp_path / "csv", paths)
    assert learnt == [tokenizer.apply_chat_template(messages, tokenize=False)]


# ------------------------------------------------------------------------------------------------------------- contents


def test_text_parts_of_a_content_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    rows = {"messages": [[{"role": "user", "content": parts}, {"role": "assistant", "content": parts[1:]}]]}
    tokenizer = chat_tokenizer()
    found = text_generation().encoding.encode(rows, [True], Coding(tokenizer, 900, 0, "llama"))
    whole = tokenizer.decode(found.features["input_ids"][0])
    assert whole == "<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"


@pytest.mark.parametrize(
    ("message", "reason", "why"),
    [
        ({"content": [{"type": "image_url", "image_url": {}}]}, "NotText", "message 1 has a part of the type 'image"),
        ({"content": [{"type": "input_audio", "input_audio": {}}]}, "NotText", "'input_audio'"),
        ({"content": {"text": "a"}}, "NotText", "message 1 has an object as content"),
        ({"content": None}, "NoContent", "message 1 has no content"),
        ({"content": 3}, "NotText", "message 1 has a number as content"),
    ],
)  # fmt: skip
def test_a_content_that_is_no_text_is_refused_with_its_row(tmp_path, paths, message, reason, why):
    good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": good}, {"messages": [{"role": "user", **message}, good[1]]}]
    data = written(tmp_path, rows)
    job = task_job(
        "text-generation", write_byte_decoder(tmp_path / "m", chat_tokenizer()), data, ["messages"],
        training=training_of(steps=1), predict=None,
    )  # fmt: skip
    with pytest.raises(StageError, match=r"train\.jsonl\), row 2") as caught:
        prepare(job, paths, NoProgress())
    assert caught.value.reason == reason
    assert why in caught.value.message
    assert why in check(job).problems[0].message


def test_arguments_that_the_product_sets_are_refused(tmp_path, paths):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    data = written(tmp_path, [{"messages": messages, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}])
    with pytest.raises(StageError, match="chat_template_kwargs has chat_template"):
        prepared_texts(write_byte_decoder(tmp_path / "m", chat_tokenizer()), data, paths)


@pytest.mark.parametrize("unlearnt", [{"weight": 0}, {"train": False}])
def test_a_reply_of_weight_0_is_read_and_not_learnt(unlearnt):
    messages = [{**LONG[2], **unlearnt} if at == 2 else message for at, message in enumerate(LONG)]
    tokenizer = chat_tokenizer()
    found = text_generation().encoding.encode({"messages": [messages]}, [True], Coding(tokenizer, 900, 0, "llama"))
    assert tokenizer.decode(found.features["input_ids"][0]) == tokenizer.apply_chat_template(LONG, tokenize=False)
    assert tokenizer.decode([each for each in found.features["labels"][0] if each >= 0]) == "yes<|im_end|>\n"


# ---------------------------------------------------------------------------------------------------------------- stops


CHATML = "{% for m in messages %}<|user|> {{ m.content }} <|assistant|> {% endfor %}"


def stops_at(template: str) -> int | None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    return reply_end(tokenizer)


def test_the_end_of_a_reply_is_the_token_that_the_template_puts_behind_it() -> None:
    assert stops_at(WRITES_BOTH) == SPECIAL.index("<|im_end|>")
    assert stops_at("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}") is None
    assert stops_at("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}") == 2
    assert stops_at("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}") is None


def test_a_trained_model_stops_where_the_template_ends_a_reply(tmp_path, paths):
    """The base model's end token is another than that of the template, which nothing else names."""
    tokenizer = word_tokenizer([*"abc", "<|end|>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|> {% endfor %}"
        "{% if add_generation_prompt %}<|assistant|> {% endif %}"
    )
    model = write_decoder(tmp_path / "model", words=[*"abc", "<|end|>"])
    tokenizer.save_pretrained(model)
    rows = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": f"{word} {word}"}]}
        for word in "abc" * 16
    ]
    job = task_job(
        "text-generation", model, written(tmp_path, rows), ["messages"],
        training=training_of(steps=40, learning_rate=1e-2),
        predict={"device": "cpu", "batch_tokens": 512},
        generation={"max_new_tokens": 20},
    )  # fmt: skip
    trained(job, paths)
    stop = tokenizer.convert_tokens_to_ids("<|end|>")
    assert GenerationConfig.from_pretrained(paths.model).eos_token_id == [tokenizer.eos_token_id, stop]
    predict(job, paths, NoProgress())
    assert {row["generated_text"] for row in predictions(paths)} == {"a a", "b b", "c c"}
    # Plain transformers, with the published files alone.
    plain, reader = AutoModelForCausalLM.from_pretrained(paths.model), AutoTokenizer.from_pretrained(paths.model)
    asked = reader.apply_chat_template(rows[0]["messages"][:1], add_generation_prompt=True, return_tensors="pt")
    made = plain.generate(**asked, max_new_tokens=20, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert reader.decode(made) == "a a <|end|>"
    assert stop in ends(plain, reader)


def test_a_template_that_does_not_end_replies_is_noted(tmp_path, paths):
    tokenizer = chat_tokenizer("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    prepared_texts(write_byte_decoder(tmp_path / "m", tokenizer), written(tmp_path, [{"messages": messages}]), paths)
    notes = PreparedData.open(paths).facts.notes
    assert any("puts no special token behind a reply" in note for note in notes)


# ------------------------------------------------------------------------------------------------------ prepared again


def key_of(tokenizer: Any, folder: Path, data: Path, paths: Any) -> tuple[str, str]:
    prepared_texts(write_byte_decoder(folder, tokenizer), data, paths)
    return json.loads((paths.prepared / "inputs.json").read_text())["key"], PreparedData.open(paths).facts.fingerprint


def test_another_template_or_end_token_prepares_again(tmp_path, paths):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    data = written(tmp_path, [{"messages": messages}])
    other_end = byte_tokenizer(WRITES_BOTH, SPECIAL, end="<|im_end|>")
    tokenizers = [
        chat_tokenizer(),
        chat_tokenizer(WRITES_OBJECTS + "{# #}"),
        other_end,
        chat_tokenizer(begin="<|begin|>"),
    ]
    keys = [key_of(tokenizer, tmp_path / str(at), data, paths)[0] for at, tokenizer in enumerate(tokenizers)]
    assert len(set(keys)) == 4
    assert key_of(chat_tokenizer(), tmp_path / "again", data, paths)[0] == keys[0]


# ---------------------------------------------------------------------------------------------------------------- cuts


LONG = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "second question"},
    {"role": "assistant", "content": "yes"},
]
SYSTEM = "<|im_start|>system\nBe kind.<|im_end|>\n"
SECOND = "<|im_start|>user\nsecond question<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"


def cut_to(length: int, messages: list[dict[str, Any]], *, learnt: bool = True, template: str = WRITES_BOTH) -> Any:
    tokenizer = chat_tokenizer(template)
    found = text_generation().encoding.encode(
        {"messages": [messages]}, [True] if learnt else None, Coding(tokenizer, length, 0, "llama")
    )
    return tokenizer.decode(found.features["input_ids"][0]), dict(found.lost), found


def test_a_long_conversation_loses_its_oldest_messages() -> None:
    whole, lost, found = cut_to(90, LONG)
    assert whole == SYSTEM + SECOND
    assert lost == {"earlier messages": 1}
    # "yes", the token that ends the reply, and a line end
    assert found.features["prompt"] == [len(found.features["input_ids"][0]) - 5]


def test_a_long_message_loses_its_beginning_but_not_its_role() -> None:
    asked = [LONG[0], {"role": "user", "content": "x" * 200 + " why?"}]
    whole, lost, _ = cut_to(60, asked, learnt=False)
    assert whole.startswith(SYSTEM + "<|im_start|>user\nx")
    assert whole.endswith("x why?<|im_end|>\n<|im_start|>assistant\n")
    assert lost == {"the beginning of the last message": 1}


def test_the_role_of_a_cut_message_ends_before_its_first_letter() -> None:
    """A letter of three bytes is three tokens here, which have one place in the text."""
    asked = [LONG[0], {"role": "user", "content": "".join(chr(0x4E00 + at) for at in range(60))}]
    _, lost, found = cut_to(60, asked, learnt=False)
    head = chat_tokenizer()(SYSTEM + "<|im_start|>user\n", add_special_tokens=False)["input_ids"]
    every = chat_tokenizer().apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    kept = found.features["input_ids"][0]
    assert kept[: len(head)] == head
    assert kept[len(head) :] == every[-(60 - len(head)) :]
    assert (len(kept), lost) == (60, {"the beginning of the last message": 1})


def test_a_system_message_that_is_too_long_is_cut_last() -> None:
    whole, lost, _ = cut_to(40, [{"role": "system", "content": "s" * 300}, *LONG[1:2]], learnt=False)
    assert whole.endswith("first question<|im_end|>\n<|im_start|>assistant\n")
    assert lost == {"the system message and the beginning of the prompt": 1}


def test_a_default_system_message_stays() -> None:
    default = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>{{ '\n' }}{% endif %}"
    whole, lost, _ = cut_to(90, LONG[1:], template=default + WRITES_BOTH)
    assert whole == SYSTEM + SECOND
    assert lost == {"earlier messages": 1}


def test_a_prompt_keeps_its_begin_token_and_the_loss_is_reported(tmp_path, paths):
    tokenizer = chat_tokenizer(begin="<|begin|>")
    model = write_byte_decoder(tmp_path / "model", tokenizer)
    write_lines(tmp_path / "d" / "train.jsonl", [{"source": "a" * 50 + "?", "target": "yes"}] * 3)
    write_lines(tmp_path / "d" / "validation.jsonl", [{"source": "a?", "target": "b" * 50}])
    job = task_job(
        "text-generation", model, tmp_path / "d", ["source", "target"],
        training=training_of(steps=1), predict=None, preparation={"max_length": 20},
    )  # fmt: skip
    facts = prepare(job, paths, NoProgress())
    ids = PreparedData.open(paths).features("train", [0])[0]["input_ids"]
    assert tokenizer.decode(ids) == "<|begin|>" + "a" * 14 + "?yes<|endoftext|>"
    assert any("3 of 3 rows of train" in note and "3 lost the beginning of the prompt" in note for note in facts.notes)
    assert any("1 lost the end of the reply" in note for note in facts.notes)


def test_a_prompt_that_leaves_no_room_for_the_answer_keeps_its_head() -> None:
    """A request may ask for more tokens than the job does: its prompt is cut then, behind the system message."""
    read: list[list[int]] = []

    class Stub:
        config = AutoConfig.for_model("llama", max_position_embeddings=16)
        generation_config = None
        device = "cpu"

        def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
            read.extend(input_ids.tolist())
            return input_ids

    feature = {"input_ids": list(range(100, 120)), "prompt": 20, "head": 3}
    tokenizer = chat_tokenizer()
    DecoderWriter().write(cast(Any, Stub()), tokenizer, [feature], Generation(max_new_tokens=6))
    assert read == [[100, 101, 102, *range(113, 120)]]
    begins = {"input_ids": [SPECIAL.index("<|begin|>"), *range(100, 119)], "prompt": 20}
    DecoderWriter().write(cast(Any, Stub()), tokenizer, [begins], Generation(max_new_tokens=6))
    assert read[1] == [SPECIAL.index("<|begin|>"), *range(110, 119)]
