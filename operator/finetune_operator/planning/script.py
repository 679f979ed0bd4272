"""A user's own training program: where it runs is planned, what it does is not.

Its memory, steps and time are its author's business. So there is no strategy to choose, no micro-batch to fit, and
nothing to adapt when memory runs out; the plan says so rather than to guess.
"""

from __future__ import annotations

from finetune_contract.trainer_job import Script
from finetune_operator.api.types import ScriptSpec
from finetune_operator.planning.draft import Draft, decided

SCRIPT = "script"
"""Where other plans name their strategy."""


def choose_script(draft: Draft) -> Draft:
    """What is said of the program in the plan."""
    world, script = draft.world, decided(draft.script)
    if world is None:  # choose_world has told why
        return draft
    place = "/".join(part for part in (script.git.path, script.entry_point) if part)
    draft = draft.because(
        f"script: every process runs {place} of {script.git.url} at {script.git.ref}, which prepare pins to a commit"
    ).because("memory: what a program of your own takes cannot be planned; it has what resources gives it")
    if world.size == 1:
        return draft
    return draft.because(
        f"distribution is the program's own: {world.size} processes find each other by RANK, WORLD_SIZE and MASTER_ADDR"
    )


def script_order(draft: Draft, script: ScriptSpec) -> Script:
    """What the trainer gets."""
    return Script(
        url=script.git.url,
        ref=script.git.ref,
        path=script.git.path,
        entry_point=script.entry_point,
        arguments=arguments(script),
        world=decided(draft.world),
        resume=draft.spec.checkpoints.resume == "auto",
    )


def arguments(script: ScriptSpec) -> tuple[str, ...]:
    """`--key value` for each hyperparameter, by name: an API server does not keep the order in which they were
    written.
    """
    given = sorted(script.hyperparameters.items())
    return tuple(word for name, value in given for word in (f"--{name}", _word(value)))


def _word(value: str | int | float | bool) -> str:
    """Numbers as Python writes them, truth values as YAML does."""
    return str(value).lower() if isinstance(value, bool) else str(value)
