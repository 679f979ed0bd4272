"""Whether what was trained can be evaluated: evaluation and prediction are one process with the whole model on its
device, however many the training is spread over.
"""

from __future__ import annotations

from dataclasses import replace

from finetune_contract.choices import Stage
from finetune_operator.planning.draft import Draft, decided
from finetune_operator.planning.facts import is_well_known
from finetune_operator.planning.quantities import human_bytes


def check_inference(draft: Draft) -> Draft:
    """Leaves out an evaluation that nobody has asked for, and refuses what was asked for, of a model whose weights in
    fp32 are more than the GPU has.

    The stages of a job that has begun stay as they are: what prepare has measured changes them no more.
    """
    known = draft.model_known and (draft.data is None or is_well_known(draft.spec.model.uri))
    if draft.inference_device == "cpu" or not known:
        return draft
    need, there = 4 * draft.model.parameters, decided(draft.hardware.gpu).memory_bytes
    if need <= there:
        return draft
    rule = f"one process with the whole model does it, whose weights take {human_bytes(need)} of {human_bytes(there)}"
    for path, asked in (("evaluation", draft.spec.evaluation), ("predict", draft.spec.predict)):
        if asked is not None:
            way_out = f"leave it out, or use devices of more than {human_bytes(need)}"
            draft = draft.refusing((path,), None, rule, way_out, "NotSupported")
    if Stage.EVALUATE not in draft.stages or draft.spec.evaluation is not None:
        return draft
    left = tuple(stage for stage in draft.stages if stage is not Stage.EVALUATE)
    return replace(draft, stages=left).because(f"no evaluation at the end: {rule}; the training measures its loss")
