"""Conversations as people wrote them.

They stay JSON text from the file to here: a column of Arrow would give nested objects the keys of all rows.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import repeat
from typing import Any

from finetune_trainer.data.file_formats import kind_of

ASSISTANT = "assistant"
SYSTEM_ROLES = ("system", "developer")
_TOOLS = ("tool", "ipython", "function", "observation")
"""Roles whose content may be an object: the result of a call."""
TOOLS, ARGUMENTS = "tools", "chat_template_kwargs"
BESIDE = (TOOLS, ARGUMENTS)
"""Columns read beside a conversation where the data have them: the row's tools, and its arguments of the template. They
have the names that trl gives them.
"""
LEARNT_IF = ("weight", "train")
"""Fields of a reply that is not learnt if one is 0 or false: OpenAI's and axolotl's."""
Message = Mapping[str, Any]


class ConversationError(ValueError):
    """A conversation that cannot be learnt or continued; the message is the rule that it breaks."""

    def __init__(self, reason: str, rule: str) -> None:
        super().__init__(rule)
        self.reason = reason


@dataclass(frozen=True)
class Conversation:
    """Messages with their tools."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template."""

    @property
    def replied(self) -> bool:
        """True if it ends with a reply."""
        return bool(self.messages[-1]["role"] == ASSISTANT)

    @property
    def opening(self) -> int:
        """Return the number of messages before the first that is not the system's; 0 if there is no other."""
        return next((at for at, message in enumerate(self.messages) if message["role"] not in SYSTEM_ROLES), 0)

    def followed_by(self, messages: Sequence[Message]) -> Conversation:
        """Return it with further messages."""
        return replace(self, messages=(*self.messages, *messages))

    def before(self, end: int) -> Conversation:
        """Return its first messages alone."""
        return replace(self, messages=self.messages[:end])


def conversations(rows: Mapping[str, Sequence[Any]], role: str) -> Iterator[Conversation]:
    """Yield the conversation of each row. Raise ConversationError for the first that is none."""
    beside = [rows.get(name) or repeat(None) for name in BESIDE]
    for messages, tools, arguments in zip(rows[role], *beside, strict=False):
        yield Conversation(messages_of(messages), tools_of(tools), arguments_of(arguments))


def messages_of(cell: Any) -> tuple[Message, ...]:
    """Read a list of messages, or its JSON text. Parts of a content that are text are joined, as most chat templates
    read text alone; an object that a tool returned becomes JSON. Raise ConversationError.
    """
    messages = _parsed(cell, "NotMessages", "a list of messages with role and content")
    if messages is None or messages == []:
        raise ConversationError("NoMessages", "a conversation needs messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConversationError("NotMessages", "it is not a list of messages with role and content")
    return tuple(_message(message, number) for number, message in enumerate(messages, start=1))


def _message(given: Message, number: int) -> Message:
    # Parquet and many writers of JSON give each message the fields of all messages.
    message = {name: value for name, value in given.items() if value is not None or name == "content"}
    if not {"role", "content"} & message.keys():
        raise ConversationError("NotMessages", f"message {number} has {', '.join(given)}, and no role and content")
    if not isinstance(message.get("role"), str):
        raise ConversationError("NoRole", f"message {number} needs its role, such as user")
    odd = [name for name in LEARNT_IF if message.get(name, True) not in (0, 1)]
    if odd:
        raise ConversationError("NotWeight", f"message {number} has {odd[0]} {message[odd[0]]!r}; it is 0 or 1")
    content = message.get("content")
    if content is None and not {"tool_calls", "function_call", "reasoning_content", "thinking"} & message.keys():
        raise ConversationError(
            "NoContent", f'message {number} has no content and calls no tool; an empty content is ""'
        )
    if content is not None and not isinstance(content, str):
        message["content"] = _text(content, number, message["role"])
    return message


def _text(content: Any, number: int, role: str) -> str:
    if isinstance(content, list) and content and all(isinstance(part, dict) and "type" in part for part in content):
        for part in content:
            if part["type"] != "text" or not isinstance(part.get("text"), str):
                rule = f"message {number} has a part of the type {part['type']!r}; only text parts can be learnt"
                raise ConversationError("NotText", rule)
        return "".join(part["text"] for part in content)
    if role in _TOOLS:
        return json.dumps(content, ensure_ascii=False)
    kind = f"{'an' if isinstance(content, dict) else 'a'} {kind_of(content)}"
    raise ConversationError("NotText", f"message {number} has {kind} as content, which is text or a list of text parts")


def tools_of(cell: Any) -> tuple[Any, ...]:
    """Read a row's list of tools, or its JSON text; a row may have none. Raise ConversationError."""
    rule = "a list of tools, each an object with name, description and parameters (JSON schema)"
    tools = _parsed(cell, "NotTools", rule)
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConversationError("NotTools", f"{TOOLS} is not {rule}")
    return tuple(tools)


def arguments_of(cell: Any) -> Mapping[str, Any]:
    """Read a row's arguments of the chat template. Raise ConversationError for those that are not the template's."""
    arguments = _parsed(cell, "NotArguments", "an object")
    if not arguments:
        return {}
    if not isinstance(arguments, dict):
        raise ConversationError("NotArguments", f"{ARGUMENTS} is not an object")
    taken = sorted(arguments.keys() & _own_arguments())
    if taken:
        rule = f"{ARGUMENTS} has {', '.join(taken)}, which the product sets; it holds variables of the chat template"
        raise ConversationError("NotArguments", rule)
    return arguments


@cache
def _own_arguments() -> frozenset[str]:
    from transformers import PreTrainedTokenizerBase

    return frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"documents"}


def json_of(cell: Any) -> Any:
    """Return the value of a cell that may be JSON text; None for an empty one."""
    if isinstance(cell, str):
        return json.loads(cell) if cell.strip() else None
    return cell


def _parsed(cell: Any, reason: str, form: str) -> Any:
    try:
        return json_of(cell)
    except (ValueError, RecursionError) as error:
        raise ConversationError(reason, f"it is text that is not JSON ({error}); it should be {form}") from error
