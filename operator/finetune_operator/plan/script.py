"""User's own training program: only its placement is planned.

Its author decides memory, steps and time. So there is no strategy to choose, no micro-batch to fit, and nothing to
adapt after it runs out of memory; the plan states that instead of guessing.
"""

from __future__ import annotations

from finetune_contract.trainer_job import Script
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.spec.types import ScriptSpec

SCRIPT = "script"
"""Value of `JobPlan.strategy` for a script."""


def choose_script(draft: Draft) -> Draft:
    """Add the plan's reasons about the program."""
    world, script = draft.world, decided(draft.script)
    if world is None:  # choose_world has added the problem
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
    """Return the trainer's script."""
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
    """Return `--key value` for each hyperparameter, sorted by name, as an API server does not keep their order."""
    given = sorted(script.hyperparameters.items())
    return tuple(word for name, value in given for word in (f"--{name}", _word(value)))


def _word(value: str | int | float | bool) -> str:
    """Format numbers as Python does, booleans as YAML does."""
    return str(value).lower() if isinstance(value, bool) else str(value)
