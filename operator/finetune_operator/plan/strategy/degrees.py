"""Degrees of tensor, pipeline and sequence parallelism that a job leaves open: each candidate is the same job with
explicit degrees, checked by every rule. So the user could have written any chosen degrees.

Only degrees known to work are tried: the model's family has to have a tensor-parallel plan, or be known to allow stages
or slices of rows. Other modules decide which degrees fit the memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from finetune_contract.plans import PIPELINE_FAMILIES, SEQUENCE_FAMILIES
from finetune_operator.plan.memory.model_parallel_plan import check_model_parallel
from finetune_operator.plan.memory.sequence_plan import check_sequence
from finetune_operator.plan.strategy.batch import divisors
from finetune_operator.plan.strategy.combination_checks import with_parallelism
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.spec.problems import Problem


def with_degrees(draft: Draft, tensor: int, pipeline: int) -> Draft:
    """Return the draft of the same job with these degrees and its problems."""
    asked, model = draft.spec.parallelism, draft.model
    stages = asked.pipeline.model_copy(update={"degree": pipeline})
    changed = with_parallelism(draft, asked.model_copy(update={"tensor": tensor, "pipeline": stages}))
    if not draft.model_known:
        changed = _unread(changed)
    elif pipeline > 1 and model.model_type not in PIPELINE_FAMILIES:
        rule = f"models of type {model.model_type} are not known to be cut into stages"
        hint = "set the degree yourself, and the trainer looks at the model"
        changed = changed.refusing(("parallelism", "pipeline", "degree"), pipeline, rule, hint)
    return check_model_parallel(changed)


def with_slices(draft: Draft, degree: int) -> Draft:
    """Return the draft of the same job with rows in `degree` slices and its problems. Packing stays as it is: memory
    does not decide the content of a step.
    """
    changed = with_parallelism(draft, draft.spec.parallelism.model_copy(update={"sequence": degree}))
    if not draft.model_known:
        changed = _unread(changed)
    elif draft.model.model_type not in SEQUENCE_FAMILIES:
        rule = f"rows of models of type {draft.model.model_type} are not known to be cut into slices"
        hint = "set the degree yourself, and the trainer looks at the model"
        changed = changed.refusing(("parallelism", "sequence"), degree, rule, hint)
    return check_sequence(changed)


def _unread(draft: Draft) -> Draft:
    rule, hint = "the model has not been read yet, and not every family can be split", "set the degree yourself"
    return draft.refusing(("parallelism",), None, rule, hint)


def degrees(nodes: int, processes_per_node: int) -> Iterator[tuple[int, int]]:
    """Yield tensor- and pipeline-parallel degrees that the processes allow, the smallest first: layers split inside a
    node, then also stages. For the same processes a replica, fewer stages come first, as they wait less.
    """
    inside = tuple(reversed(divisors(processes_per_node)))
    yield from ((tensor, 1) for tensor in inside[1:])
    cut = [(tensor, stages) for tensor in inside for stages in divisors(nodes * processes_per_node // tensor)[:-1]]
    yield from sorted(cut, key=lambda pair: (pair[0] * pair[1], pair[1]))


def spreads(draft: Draft) -> Iterator[Draft]:
    """Yield the drafts of all degrees that the processes allow, in the order of `degrees`."""
    world = decided(draft.world)
    for tensor, stages in degrees(world.nodes, world.processes_per_node):
        yield with_degrees(draft, tensor, stages)


def slices(draft: Draft) -> Iterator[tuple[Draft, ...]]:
    """Yield the drafts of all sequence-parallel degrees that the processes allow, in two groups, each smallest first:
    those inside a node, then those over several.
    """
    world = decided(draft.world)
    inside, everywhere = (tuple(reversed(divisors(count)))[1:] for count in (world.processes_per_node, world.size))
    yield tuple(with_slices(draft, degree) for degree in inside)
    yield tuple(with_slices(draft, degree) for degree in everywhere if degree not in inside)


def obstacles(problems: tuple[Problem, ...]) -> tuple[str, ...]:
    """Return the reasons against a job's degrees: the first clause of each rule, without the lists that follow. If both
    a rule of the API and a phase of the plan refuse a field, only the phase's reason is kept, as it fits the choice.
    """
    fields = [problem.path for problem in problems]
    last = [
        problem
        for at, problem in enumerate(problems)
        if not any(field == problem.path or field.startswith(f"{problem.path}.") for field in fields[at + 1 :])
    ]
    return tuple(dict.fromkeys(problem.rule.partition(";")[0] for problem in last))
