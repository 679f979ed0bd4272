"""Conversations as tokens, by the tokenizer's chat template."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.tasks.bounded_templates import render
from finetune_trainer.tasks.conversations import ASSISTANT, LEARNT_IF, Conversation, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Turns:
    """A conversation rendered by the template."""

    text: str
    replies: tuple[tuple[int, int, bool], ...]
    """First and last character (exclusive) of each assistant reply, the end of its turn included; False: not learnt."""


@dataclass(frozen=True)
class TalkTokens:
    """A conversation as tokens."""

    ids: list[int]
    replied: list[bool]
    """True for each token of a reply that is learnt."""
    prompt: int
    """Tokens before the last reply; all tokens where it is still to be written."""
    starts: Sequence[int]
    """First character of each token."""
    talk: Conversation
    text: str


def tokens_of(tokenizer: PreTrainedTokenizerBase, talk: Conversation, *, learnt: bool) -> TalkTokens:
    """Encode the whole conversation for training (`learnt`), else the part before the reply that is to be written.
    Raise StageError DATA for one that the template does not accept.
    """
    try:
        turns = (with_replies if learnt else prompt_turns)(tokenizer, talk)
    except ValueError as error:
        raise StageError(
            FailureClass.DATA,
            "ConversationRefused",
            f"A conversation that begins with {str(talk.messages[0])[:80]!r} does not fit the model's chat template: "
            f"{error}.",
            "Correct its messages (roles, their order), or use a model with another template.",
        ) from error
    tokens = tokenizer(
        turns.text,
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    ids, offsets = tokens["input_ids"], tokens["offset_mapping"]
    starts = [start for start, _ in offsets]
    replied, prompt = [False] * len(ids), len(ids)
    for first, last, is_learnt in turns.replies:
        prompt, end = bisect_left(starts, first), bisect_left(starts, last)
        replied[prompt:end] = [is_learnt] * (end - prompt)
    return TalkTokens(ids, replied, prompt, starts, talk, turns.text)


def with_replies(tokenizer: PreTrainedTokenizerBase, talk: Conversation) -> Turns:
    """Render the whole conversation. Raise ValueError when the template renders earlier turns differently once later
    ones follow: the limits of replies would be unknown.
    """
    text, replies = _render(tokenizer, talk), []
    for at, message in enumerate(talk.messages):
        if message["role"] != ASSISTANT:
            continue
        before = _render(tokenizer, talk.before(at), reply=True)
        until = text if at + 1 == len(talk.messages) else _render(tokenizer, talk.before(at + 1))
        if not (text.startswith(before) and text.startswith(until) and len(before) < len(until)):
            raise ValueError(
                f"the chat template writes message {at + 1} in another way when messages follow it; "
                "give each reply a row of its own, with the messages before it"
            )
        replies.append((len(before), len(until), all(message.get(name, True) for name in LEARNT_IF)))
    return Turns(text, tuple(replies))


def prompt_turns(tokenizer: PreTrainedTokenizerBase, talk: Conversation) -> Turns:
    """Render the part before the reply that is to be written; replies that end the conversation are left out."""
    end = len(talk.messages)
    while end and talk.messages[end - 1]["role"] == ASSISTANT:
        end -= 1
    return Turns(_render(tokenizer, talk.before(end), reply=True), ())


def _render(tokenizer: PreTrainedTokenizerBase, talk: Conversation, *, reply: bool = False) -> str:
    if not talk.messages:
        return ""
    messages = [_as_expected(tokenizer, message) for message in talk.messages]
    return _applied(tokenizer, messages, list(talk.tools) or None, reply=reply, **talk.arguments)


def _applied(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: list[Any] | None = None,
    *,
    reply: bool = False,
    **variables: Any,
) -> str:
    """Return the text of transformers' `apply_chat_template`, which would render it without limits."""
    conversation = [{name: value for name, value in message.items() if value is not None} for message in messages]
    return render(
        {
            "conversations": [conversation],
            "tools": tools,
            "chat_template": tokenizer.get_chat_template(tools=tools),
            "add_generation_prompt": reply,
            **tokenizer.special_tokens_map,
            **variables,
        }
    )


MARK = "Zq7Xw"
"""Content of a message that templates are tried with: no template has it."""


def rendered_prefix(tokenizer: PreTrainedTokenizerBase, talk: Conversation, end: int) -> str | None:
    """Render the first messages; None for a template that does not accept them without the others."""
    try:
        return _render(tokenizer, talk.before(end))
    except ValueError:
        return None


def require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise StageError MODEL for a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        raise StageError(
            FailureClass.MODEL,
            "NoChatTemplate",
            "The rows are conversations, and the model's tokenizer has no chat template.",
            "Use a model that was trained for conversations, or name the texts of a prompt and its answer, such as "
            "columns: {source: instruction, target: output} for rows of Alpaca.",
        )


# ----------------------------------------------------------------------------------------------- arguments of functions

_PROBE = {"probe_name": "probe_value"}
_PROBE_TEXT = '{"probe_name":"probe_value"}'


def _as_expected(tokenizer: PreTrainedTokenizerBase, message: Message) -> dict[str, Any]:
    """Return the message with the arguments of its calls as the template expects them: as text, or as an object."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    texts, objects = _accepted(tokenizer)

    def call(given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if isinstance(given.get("function"), dict):
            return {**given, "function": call(given["function"])}
        arguments = given.get("arguments")
        if isinstance(arguments, str) and objects and not texts:
            try:
                return {**given, "arguments": json.loads(arguments)}
            except ValueError as error:
                raise ValueError(f"the arguments of a call are {arguments[:60]!r}, which is not JSON") from error
        if isinstance(arguments, dict | list) and texts and not objects:
            return {**given, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return given

    return {**message, "tool_calls": [call(given) for given in calls]}


def _accepted(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Return whether the template writes arguments of calls well that are text, and that are an object."""
    template = tokenizer.chat_template
    key = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    if key not in _ACCEPTED:
        _ACCEPTED[key] = (
            _PROBE_TEXT in _probed(tokenizer, _PROBE_TEXT),
            json.dumps(_PROBE) in _probed(tokenizer, _PROBE).replace('":"', '": "'),
        )
    return _ACCEPTED[key]


_ACCEPTED: dict[str, tuple[bool, bool]] = {}
"""Chat template -> the answer of `_accepted`."""


def _probed(tokenizer: PreTrainedTokenizerBase, arguments: Any) -> str:
    function = {"name": "probe", "arguments": arguments}
    call = {"id": "probe0000", "type": "function", "function": function}
    messages: Any = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "", "tool_calls": [call]}]
    try:
        return _applied(tokenizer, messages)
    except ValueError:
        return ""


# ------------------------------------------------------------------------------------------------------ ends of replies


def reply_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token that the chat template puts behind a reply; None: it puts none there."""
    template = tokenizer.chat_template
    if not template:
        return None
    key = json.dumps([template, str(tokenizer.eos_token)], sort_keys=True)
    if key not in _ENDS:
        _ENDS[key] = _behind(tokenizer)
    added = _ENDS[key]
    found = None if added is None else tokenizer.convert_tokens_to_ids(added)
    return found if isinstance(found, int) else None


_ENDS: dict[str, str | None] = {}
"""Chat template and end token -> the token of `reply_end`."""


def _behind(tokenizer: PreTrainedTokenizerBase) -> str | None:
    talk = Conversation(({"role": "user", "content": "a"}, {"role": ASSISTANT, "content": MARK}))
    _, _, behind = (rendered_prefix(tokenizer, talk, 2) or "").rpartition(MARK)
    added = sorted(map(str, {**tokenizer.get_added_vocab(), **dict.fromkeys(tokenizer.all_special_tokens)}), key=len)
    return next((token for token in reversed(added) if token and behind.lstrip().startswith(token)), None)


def reply_note(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return a note if the chat template puts no token behind a reply."""
    if reply_end(tokenizer) is not None:
        return ()
    return (
        "The model's chat template puts no special token behind a reply: the model does not learn where a reply ends, "
        "and writes up to generation.maxNewTokens tokens.",
    )
