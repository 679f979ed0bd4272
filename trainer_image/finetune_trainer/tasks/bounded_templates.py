"""Chat templates rendered in a process of their own, with limits of time, memory and output."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

from finetune_contract.layout import FailureClass
from finetune_contract.python_command import module_command
from finetune_trainer.core.failures import StageError
from finetune_trainer.tasks import template_process
from finetune_trainer.tasks.template_process import CPU_SECONDS, MEMORY_BYTES, REFILL_SECONDS

_OUTPUT_BYTES, _OUTPUT_FACTOR = 1 << 20, 8
"""Longest text: so much, and so many times the conversation, as `tojson` escapes a character by six."""


class TemplateRefusedError(ValueError):
    """The template does not accept the conversation."""


class _Renderer:
    """This process's renderer, started with the first text. Threads take turns."""

    def __init__(self) -> None:
        self._turn = Lock()
        self._started: tuple[Connection, subprocess.Popen[bytes]] | None = None

    def render(self, arguments: Mapping[str, Any]) -> str:
        """See `render`."""
        request = pickle.dumps(arguments)
        with self._turn:
            if self._started is None:
                self._started = _start()
            connection, process = self._started
            try:
                connection.send_bytes(request)
                answer = connection.recv_bytes(_OUTPUT_BYTES + _OUTPUT_FACTOR * len(request))
            except BaseException as error:
                # Also after a signal: no later text may get the answer to this one.
                self._started = None
                connection.close()
                process.kill()
                process.wait()
                if isinstance(error, EOFError | OSError):
                    raise _exceeded() from error
                raise
        text = answer[1:].decode("utf-8", "surrogatepass")
        if answer[:1] != b"=":
            raise TemplateRefusedError(text)
        return text


def _start() -> tuple[Connection, subprocess.Popen[bytes]]:
    ours, theirs = Pipe()
    with theirs:
        command = module_command(template_process.__name__, str(theirs.fileno()))
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )
    ours.recv_bytes()  # sent once the limits are set
    return ours, process


def _exceeded() -> StageError:
    return StageError(
        FailureClass.MODEL,
        "ChatTemplateExceedsLimits",
        "The model's chat template took more for a conversation than any should: "
        f"{CPU_SECONDS:g} CPU seconds ({REFILL_SECONDS:g} on average), {MEMORY_BYTES >> 20} MiB, "
        f"or {_OUTPUT_FACTOR} times its length.",
        "Use a model with another template; it is chat_template.jinja or tokenizer_config.json of the model.",
    )


_renderer = _Renderer()


def _forget() -> None:
    global _renderer
    _renderer = _Renderer()


os.register_at_fork(after_in_child=_forget)  # the parent's is the parent's


def render(arguments: Mapping[str, Any]) -> str:
    """Return the text of `render_jinja_template`'s arguments. Raise TemplateRefusedError for a conversation that the
    template does not accept, StageError MODEL for a template that exceeds the limits.
    """
    return _renderer.render(arguments)
