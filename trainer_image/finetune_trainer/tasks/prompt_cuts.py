"""Prompts that are too long: what is left out, so that the begin token and the system message stay."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from finetune_trainer.tasks.chat_template import MARK, TalkTokens, rendered_prefix
from finetune_trainer.tasks.conversations import ASSISTANT, Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END = "the end of the reply"
"""Name of the part that a row loses whose prompt is short already."""


@dataclass(frozen=True)
class Cut:
    """Tokens of a prompt that are left out, so that the rest fits."""

    start: int
    end: int
    """Tokens from `start` to `end` (exclusive) are left out; those before it are the begin token and the system
    message, and where a message is cut, its role.
    """
    again: tuple[int, int] = (0, 0)
    """Tokens that stand between both parts: the role of the message whose beginning is left out."""
    lost: str = "the beginning of the prompt"

    def of(self, values: Sequence[Any]) -> list[Any]:
        """Return what is left of one value for each token."""
        return [*values[: self.start], *values[slice(*self.again)], *values[self.end :]]

    @property
    def size(self) -> int:
        """Number of tokens by which the prompt gets shorter."""
        return self.end - self.start - (self.again[1] - self.again[0])


def head_of(tokenizer: PreTrainedTokenizerBase, tokens: TalkTokens, special: Collection[int]) -> int:
    """Return the number of tokens that a prompt keeps wherever it is cut: the begin token and the system message.
    `special`: the ids of special tokens.
    """
    system = tokens.talk.opening
    if not system:
        return leading_special(special, tokens.ids)
    given = json.dumps([tokens.talk.messages[:system], tokens.talk.tools, tokens.talk.arguments])
    key = (str(tokenizer.chat_template), given)
    if key not in _SYSTEM_TEXTS:
        if len(_SYSTEM_TEXTS) >= _MOST_SYSTEM_TEXTS:
            _SYSTEM_TEXTS.clear()
        _SYSTEM_TEXTS[key] = rendered_prefix(tokenizer, tokens.talk, system)
    before = _SYSTEM_TEXTS[key]
    if before is None or not tokens.text.startswith(before):
        return leading_special(special, tokens.ids)
    return bisect_left(tokens.starts, len(before))


_SYSTEM_TEXTS: dict[tuple[str, str], str | None] = {}
"""Chat template, and system message with its tools -> their text."""
_MOST_SYSTEM_TEXTS = 1000


def leading_special(special: Collection[int], ids: Sequence[int]) -> int:
    """Return the number of special tokens with which a sequence begins, such as the begin token."""
    return next((at for at, token in enumerate(ids) if token not in special), len(ids))


def prompt_cut(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], drop: int, prompt: int) -> Cut:
    """Return the cut of a prompt that is text, by `drop` tokens: behind its leading special tokens."""
    head = min(leading_special(tokenizer.all_special_ids, ids[:prompt]), max(0, prompt - drop))
    return Cut(head, head + drop)


def talk_cut(tokenizer: PreTrainedTokenizerBase, tokens: TalkTokens, drop: int) -> Cut:
    """Return the cut of a conversation by at least `drop` tokens of its prompt: whole messages behind the system
    message, from the oldest; of the last one its beginning, but not its role.
    """
    keep = tokens.prompt - drop
    system, starts = tokens.talk.opening, _message_starts(tokenizer, tokens)
    if starts is not None:
        asked = [at for at in range(system, len(starts)) if tokens.talk.messages[at]["role"] == "user"]
        head = starts[system] if system < len(starts) else 0
        for at in asked:
            if at > system and head + tokens.prompt - starts[at] <= keep:
                return Cut(head, starts[at], lost="earlier messages")
        last = asked[-1] if asked else None
        content = None if last is None else _content_start(tokens, starts, last)
        if last is not None and content is not None and head + content - starts[last] + _LEAST <= keep:
            role = content - starts[last]
            end = tokens.prompt - (keep - head - role)
            return Cut(head, end, (starts[last], content), lost="the beginning of the last message")
    plain = prompt_cut(tokenizer, tokens.ids, drop, tokens.prompt)
    return replace(plain, lost="the system message and the beginning of the prompt") if system else plain


_LEAST = 8
"""Least tokens of a message that is cut: with fewer the system message is cut as well."""


def _message_starts(tokenizer: PreTrainedTokenizerBase, tokens: TalkTokens) -> list[int] | None:
    """Return the first token of each message of the prompt; None for a template that writes them together."""
    starts = []
    for at in range(len(tokens.talk.messages)):
        before = rendered_prefix(tokenizer, tokens.talk, at) if at else _preface(tokenizer, tokens)
        if before is None or not tokens.text.startswith(before):
            return None
        first = bisect_left(tokens.starts, len(before))
        if first >= tokens.prompt:
            break
        starts.append(first)
    return starts


def _preface(tokenizer: PreTrainedTokenizerBase, tokens: TalkTokens) -> str:
    """Return the text before the first message, such as a default system message; empty if it is one itself."""
    if tokens.talk.messages[0]["role"] != "user":
        return ""
    asked = Conversation(({"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}))
    before = rendered_prefix(tokenizer, asked, 2)
    whole = rendered_prefix(tokenizer, asked.followed_by(({"role": "user", "content": MARK},)), 3)
    if before is None or whole is None or not whole.startswith(before):
        return ""
    header = whole[len(before) :].partition(MARK)[0]
    return tokens.text[: max(0, tokens.text.find(header))] if header else ""


def _content_start(tokens: TalkTokens, starts: Sequence[int], at: int) -> int | None:
    """Return the first token of a message's content."""
    content = str(tokens.talk.messages[at].get("content") or "").strip()
    found = tokens.text.find(content, tokens.starts[starts[at]]) if content else -1
    if found < 0:
        return None
    first = bisect_left(tokens.starts, found)
    # Bytes of one letter may be tokens of one place; or a token begins before the content.
    return first if first < len(tokens.starts) and tokens.starts[first] == found else first - 1
