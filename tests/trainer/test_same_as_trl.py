"""Rows in the documented forms of other tools give the tokens that trl gives, and the same ones are learnt.

The right side of each pair is the row in trl's own form, written by hand.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Json
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.prepare.prepare import prepare
from trainer_support.tasks import byte_tokenizer, task_job, training_of, write_byte_decoder, write_lines

_CONTENT = (
    "{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{- m.content or '' }}"
    "{%- for call in m.tool_calls or [] %}CALL {{ call.function.name }} "
    "{%- if call.function.arguments is string %}{{ call.function.arguments }}"
    "{%- else %}{{ call.function.arguments | tojson }}{% endif %}{% endfor %}{{- '<|im_end|>\n' }}"
)
TEMPLATE = (
    "{%- if mood is defined and mood %}MOOD {{ mood }}{% endif %}"
    "{%- if tools %}<|im_start|>system TOOLS {{ tools | tojson }}<|im_end|>{{ '\n' }}{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}{% generation %}" + _CONTENT + "{% endgeneration %}"
    "{%- else %}" + _CONTENT + "{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>{{ 'assistant\n' }}{% endif %}"
)
"""Its mark of replies is what trl learns by; ours is found without it."""


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: Any, **further: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **further}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def calls(*functions: tuple[str, Any]) -> dict[str, Any]:
    made = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in functions]
    return says("", tool_calls=made)


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def turn(sender: str, value: str) -> dict[str, Any]:
    return {"from": sender, "value": value}


TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": {"type": "object"}}}
    for name in ("pay", "weather")
]
CHATS = [
    [user("Hi"), says("Hello!")],
    [system("Be brief."), user("2+2?"), says("4"), user("3+3?"), says("6")],
    [user("Zürich 🏔 日本語?"), says("Ja — schön.")],
]
PLAIN = [{"messages": chat} for chat in CHATS]
PAID = [user("pay 5"), calls(("pay", {"amount": 5, "note": None})), result("ok"), says("Paid.")]
COLD = [user("Köln?"), calls(("weather", {"city": "Köln"})), result('{"t": 3}'), says("3 degrees.")]
CALLING = [{"messages": chat, "tools": TOOLS} for chat in (PAID, COLD)]
BOTH = [user("both"), calls(("pay", {"amount": 1}), ("weather", {"days": [1, 2]})), result("a"), says("Done")]
COLOURS = {"prompt": [user("sky?")], "chosen": [says("blue")], "rejected": [says("green")]}


def arguments_as_text(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = copy.deepcopy(rows)
    for made in (
        call["function"] for row in rows for message in row["messages"] for call in message.get("tool_calls", ())
    ):
        made["arguments"] = json.dumps(made["arguments"], ensure_ascii=False)
    return rows


def in_parts(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in chat]


GENERATION: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "messages": (PLAIN, PLAIN),
    "messages with null fields": (
        [{"messages": [{**message, "name": None, "tool_calls": None} for message in chat]} for chat in CHATS],
        PLAIN,
    ),
    "messages as JSON text": ([{"messages": json.dumps(chat)} for chat in CHATS], PLAIN),
    "text parts": ([{"messages": in_parts(chat)} for chat in CHATS], PLAIN),
    "empty contents": (
        [{"messages": [user(""), says("x")]}, {"messages": [system(""), user("q"), says("y")]}],
        [{"messages": [user(""), says("x")]}, {"messages": [system(""), user("q"), says("y")]}],
    ),
    "calls with objects": (CALLING, CALLING),
    "calls with text": (arguments_as_text(CALLING), arguments_as_text(CALLING)),
    "parallel calls": ([{"messages": BOTH, "tools": TOOLS}], [{"messages": BOTH, "tools": TOOLS}]),
    "tools as JSON text": ([{**row, "tools": json.dumps(TOOLS)} for row in CALLING], CALLING),
    "thoughts of their own": (
        [{"messages": [user("2+2?"), says("4", reasoning_content="two and two")]}],
        [{"messages": [user("2+2?"), says("4", reasoning_content="two and two")]}],
    ),
    "thoughts in the content": (
        [{"messages": [user("2+2?"), says("<think>two</think>\n4")]}],
        [{"messages": [user("2+2?"), says("<think>two</think>\n4")]}],
    ),
    "variables of the template": (
        [{**row, "chat_template_kwargs": {"mood": mood}} for row, mood in zip(PLAIN, ("glad", "sad"), strict=False)],
        [{**row, "chat_template_kwargs": {"mood": mood}} for row, mood in zip(PLAIN, ("glad", "sad"), strict=False)],
    ),
    "text": (
        [{"text": "The cat sat."}, {"text": "Ein Satz, ß."}],
        [{"text": "The cat sat."}, {"text": "Ein Satz, ß."}],
    ),
    "trl, prompt and completion": (
        [{"prompt": "The sky is", "completion": " blue."}, {"prompt": "", "completion": "cödé"}],
        [{"prompt": "The sky is", "completion": " blue."}, {"prompt": "", "completion": "cödé"}],
    ),
    "trl, prompt and completion as messages": (
        [{"prompt": CHATS[1][:-1], "completion": CHATS[1][-1:]}],
        [{"prompt": CHATS[1][:-1], "completion": CHATS[1][-1:]}],
    ),
    "Alpaca": (
        [{"instruction": "Add", "input": "2 and 3", "output": "5"}, {"instruction": "Hi", "input": "", "output": "hi"}],
        [{"messages": [user("Add\n2 and 3"), says("5")]}, {"messages": [user("Hi"), says("hi")]}],
    ),
    "Alpaca with history": (
        [{"instruction": "4+4?", "input": "", "output": "8", "system": "Count.", "history": [["1+1?", "2"]]}],
        [{"messages": [system("Count."), user("1+1?"), says("2"), user("4+4?"), says("8")]}],
    ),
    "Dolly": (
        [{"instruction": "When?", "context": "It began in 2000.", "response": "In 2000.", "category": "qa"}],
        [{"messages": [user("When?\nIt began in 2000."), says("In 2000.")]}],
    ),
    "ShareGPT": (
        [
            {"conversations": [turn("human", "Hi"), turn("gpt", "Hello")]},
            {"conversations": [turn("system", "S"), turn("human", "Q"), turn("gpt", "A")]},
        ],
        [{"messages": [user("Hi"), says("Hello")]}, {"messages": [system("S"), user("Q"), says("A")]}],
    ),
    "ShareGPT with OpenAI's names": (
        [{"conversations": [turn("user", "Hi"), turn("assistant", "Yo")]}],
        [{"messages": [user("Hi"), says("Yo")]}],
    ),
    "ShareGPT with calls": (
        [
            {
                "conversations": [
                    turn("human", "pay 5"),
                    turn("function_call", '{"name": "pay", "arguments": {"amount": 5}}'),
                    turn("observation", "ok"),
                    turn("gpt", "Paid."),
                ],
                "system": "You pay.",
                "tools": json.dumps(TOOLS),
            }
        ],
        [
            {
                "messages": [
                    *(system("You pay."), user("pay 5"), calls(("pay", {"amount": 5})), result("ok"), says("Paid.")),
                ],
                "tools": TOOLS,
            }
        ],
    ),
    "messages in conversations": ([{"conversations": CHATS[0]}], PLAIN[:1]),
}
PREFERENCE: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "text": (
        [{"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}],
        [{"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}],
    ),
    "messages": ([COLOURS], [COLOURS]),
    "implicit prompt": (
        [{name: COLOURS["prompt"] + COLOURS[name] for name in ("chosen", "rejected")}],
        [{name: COLOURS["prompt"] + COLOURS[name] for name in ("chosen", "rejected")}],
    ),
    "implicit prompt as text": (
        [{"chosen": "Human: sky? Assistant: blue", "rejected": "Human: sky? Assistant: green"}],
        [{"chosen": "Human: sky? Assistant: blue", "rejected": "Human: sky? Assistant: green"}],
    ),
    "prompt twice": (
        [{"prompt": "sky?", **{name: COLOURS["prompt"] + COLOURS[name] for name in ("chosen", "rejected")}}],
        [COLOURS],
    ),
    "ShareGPT": (
        [{"conversations": [turn("human", "sky?")], "chosen": turn("gpt", "blue"), "rejected": turn("gpt", "green")}],
        [COLOURS],
    ),
    "Alpaca": (
        [{"instruction": "Which", "input": "sky?", "chosen": "blue", "rejected": "green"}],
        [{**COLOURS, "prompt": [user("Which\nsky?")]}],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = byte_tokenizer(TEMPLATE, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), end="<|endoftext|>")
    return write_byte_decoder(tmp_path_factory.mktemp("model"), made)


def prepared(task: str, folder: Path, rows: list[dict[str, Any]], place: Path, paths: Any) -> list[Any]:
    for split in ("train", "validation"):
        write_lines(place / "data" / f"{split}.jsonl", rows)
    columns = ["text"] if task == "text-generation" else ["prompt", "chosen", "rejected"]
    job = task_job(
        task, folder, place / "data", columns,
        training=training_of(steps=1), predict=None, evaluation=None, preparation={"max_length": 1000},
    )  # fmt: skip
    facts = prepare(job, paths, NoProgress())
    return PreparedData.open(paths).features("train", range(facts.splits["train"].rows))


def trl_rows(rows: list[dict[str, Any]]) -> Dataset:
    """Return rows for trl; with calls as JSON, as a struct would give each call the arguments of all calls."""
    nested = "tool_calls" in json.dumps(rows)
    return Dataset.from_list(rows, features=Features({name: Json() for name in rows[0]}) if nested else None)


SETTINGS: dict[str, Any] = {"max_length": 1000, "use_cpu": True, "bf16": False, "report_to": []}


@pytest.mark.parametrize("form", GENERATION)
def test_the_same_tokens_are_learnt_as_by_trl(form: str, folder: Path, tmp_path: Path, paths: Any) -> None:
    given, in_trl_form = copy.deepcopy(GENERATION[form])
    ours = prepared("text-generation", folder, given, tmp_path, paths)
    settings = SFTConfig(
        output_dir=str(tmp_path / "trl"),
        assistant_only_loss="messages" in in_trl_form[0],
        eos_token="<|endoftext|>",
        **SETTINGS,
    )
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    theirs = SFTTrainer(model=model, args=settings, train_dataset=trl_rows(in_trl_form), processing_class=tokenizer)
    assert len(ours) == len(theirs.train_dataset)
    for one, other in zip(ours, theirs.train_dataset, strict=True):
        assert tokenizer.decode(one["input_ids"]) == tokenizer.decode(other["input_ids"])
        learnt = [label >= 0 for label in other["labels"]]
        # The first token follows no other, so that trl's loss leaves it out later.
        assert [label >= 0 for label in one["labels"].tolist()] == [False, *learnt[1:]]


@pytest.mark.parametrize("form", PREFERENCE)
def test_the_same_pairs_are_learnt_as_by_trl(form: str, folder: Path, tmp_path: Path, paths: Any) -> None:
    given, in_trl_form = copy.deepcopy(PREFERENCE[form])
    ours = prepared("preference-tuning", folder, given, tmp_path, paths)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    theirs = DPOTrainer(
        model=model,
        args=DPOConfig(output_dir=str(tmp_path / "trl"), **SETTINGS),
        train_dataset=Dataset.from_list(in_trl_form),
        processing_class=tokenizer,
    )
    for one, other in zip(ours, theirs.train_dataset, strict=True):
        chosen, ids = int(one["chosen"]), one["input_ids"].tolist()
        assert ids[: int(one["prompt"])] == other["prompt_ids"]
        assert ids[:chosen] == other["prompt_ids"] + other["chosen_ids"]
        assert ids[chosen:] == other["prompt_ids"] + other["rejected_ids"]
