"""Start of a plan: facts, with an assumption and a sentence in place of each that is missing."""

from __future__ import annotations

from typing import Literal

from finetune_contract.byte_text import human_bytes
from finetune_contract.facts import DeviceFacts, HardwareFacts
from finetune_operator.plan.hardware.assumed_hardware import assumed_device, assumed_hardware, node_description
from finetune_operator.plan.hardware.devices import mig_memory, mig_product
from finetune_operator.plan.hardware.gpu_nodes import gpu_resource
from finetune_operator.plan.hardware.planned_devices import weakest
from finetune_operator.plan.models.assumed_models import assumed_model, is_well_known
from finetune_operator.plan.types.draft import Basis, Draft, Lengths, PlanInputs
from finetune_operator.plan.types.plan_types import Adaptation, Facts
from finetune_operator.spec.checks.copied_settings import settle
from finetune_operator.spec.checks.notices import notices
from finetune_operator.spec.quantities import parse_quantity
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import FineTuneJob, FineTuneJobSpec


def begin(job: FineTuneJob, facts: Facts, settings: Settings, adaptation: Adaptation, as_known: bool) -> Draft:
    """Return a draft with assumptions for all missing facts, and with copied settings replaced by our fields."""
    reasons = notices(job.spec, settings.network_policy)
    job = job.model_copy(update={"spec": settle(job.spec).spec})
    assumptions: list[str] = []
    model = facts.model
    if model is None:
        model, sentence = assumed_model(job.spec.model.uri, job.spec.task)
        assumptions.append(sentence)
    hardware, sentences = _hardware(job.spec, facts, settings)
    assumptions += sentences
    basis = Basis(
        hardware=hardware,
        device_source=_device_source(facts, hardware.gpu),
        model=model,
        model_known=facts.model is not None or is_well_known(job.spec.model.uri),
        lengths=Lengths(longest=1, typical=1.0),
    )
    inputs = PlanInputs(job, facts, settings, adaptation, as_known)
    draft = Draft(inputs, basis, reasons=reasons, assumptions=tuple(assumptions))
    return _with_lengths(draft)


def _hardware(spec: FineTuneJobSpec, facts: Facts, settings: Settings) -> tuple[HardwareFacts, list[str]]:
    """Return the hardware that a pod gets, and sentences with the assumptions."""
    hardware, resources = facts.hardware, spec.resources
    cores = None if resources.cpu is None else parse_quantity(resources.cpu)
    memory = None if resources.memory is None else parse_quantity(resources.memory)
    if hardware is None:
        gpus = 0 if resources.gpus_per_node == "auto" else resources.gpus_per_node
        device, sentences = _device_of(spec, facts, settings) if gpus else (None, [])
        hardware, sentence = assumed_hardware(gpus, device, cores, memory, measured=bool(facts.devices))
        return hardware, [sentence, *sentences]
    # A pod gets its requests, and no more than the node has.
    limited = {
        "cpu_cores": hardware.cpu_cores if cores is None else min(hardware.cpu_cores, max(1, int(cores))),
        "memory_bytes": hardware.memory_bytes if memory is None else min(hardware.memory_bytes, max(1, int(memory))),
    }
    hardware = hardware.model_copy(update=limited)
    assumptions: list[str] = []
    if hardware.gpus_per_node and hardware.gpu is None:
        device, assumptions = _device_of(spec, facts, settings)
        hardware = hardware.model_copy(update={"gpu": device})
    if hardware.assumed:
        node = node_description(hardware)
        assumptions = [*assumptions, f"hardware: the node was not measured, or only in part; {node} are taken"]
    return hardware, assumptions


def _device_source(facts: Facts, gpu: DeviceFacts | None) -> Literal["known", "assumed", "measured"]:
    if gpu is None or (facts.hardware is not None and facts.hardware.gpu is not None):
        return "known"
    if facts.devices:
        return "measured"
    return "assumed" if gpu.assumed else "known"


def _device_of(spec: FineTuneJobSpec, facts: Facts, settings: Settings) -> tuple[DeviceFacts, list[str]]:
    """Return the GPU of unmeasured nodes, by earlier attempts, by their labels or by the job and the tables, and
    sentences with the assumptions.
    """
    measured, nodes = weakest(facts.devices), facts.nodes
    if measured is not None:
        several = "" if len(facts.devices) == 1 else f", the weakest of {len(facts.devices)} kinds"
        units = "with bf16" if measured.bf16 else "without bf16"
        has = f"{measured.product} with {human_bytes(measured.memory_bytes)}, {units}"
        return measured, [f"hardware: {has}{several}: measured by an earlier attempt"]
    if nodes is not None and nodes.gpu is not None:
        return nodes.gpu, [f"hardware: {nodes.words}"]
    accelerator = spec.resources.accelerator
    memory = None if accelerator.memory is None else int(parse_quantity(accelerator.memory))
    resource = gpu_resource(spec, settings.defaults)
    product = mig_product(accelerator.product, resource)
    device, sentence = assumed_device(product, memory or mig_memory(resource), settings.hardware)
    sources = [] if nodes is None else [f"hardware: {nodes.words}"]
    return device, sources + ([] if sentence is None else [sentence])


def _with_lengths(draft: Draft) -> Draft:
    """Set the lengths of the prepared rows; before prepare, every row counts as being as long as the limit."""
    split = draft.train_split
    limit = draft.length_limit
    # A row with two answers is two sequences, each with the prompt.
    sequences = 2 if draft.compares else 1
    if split is not None and split.rows and split.longest:
        # Rows are measured as a whole: neither of two sequences is known to be shorter than the limit.
        longest = split.longest if sequences == 1 else min(split.longest, limit)
        typical = max(1.0, split.tokens / split.rows / sequences)
        return draft.with_basis(lengths=Lengths(longest, typical, sequences))
    draft = draft.with_basis(lengths=Lengths(limit, float(limit), sequences))
    if not draft.loops or split is not None:
        return draft
    subject = "every row is" if sequences == 1 else f"the {sequences} sequences of every row are"
    most = "the most it can have" if sequences == 1 else "the most they can have"
    return draft.assuming(f"lengths: nothing is prepared yet; {subject} taken to have {limit} tokens, {most}")
