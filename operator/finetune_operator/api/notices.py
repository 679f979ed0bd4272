"""What a person should know of a job that is accepted: settings that were copied, and values that look like slips.

None of it stops a job. `finetune validate`, `plan` and `run` print the sentences, the API server's answer carries them
as warnings, and they are the first reasons of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from finetune_contract.choices import OptimizerName, Task
from finetune_operator.api.copied import settle
from finetune_operator.api.types import FineTuneJobSpec

HIGH_RATES: Mapping[OptimizerName, float] = {"adamw": 0.01, "adafactor": 0.1, "sgd": 1.0}
"""Learning rates above which fine-tuning diverges. AdamW moves each weight by about the rate in a step: published
rates are 1e-5 to 5e-5 for all weights (Devlin et al., 2018, appendix A.3) and 1e-4 to 2e-3 for adapters (Hu et al.,
2021, appendix D). Adafactor's relative steps are 1e-2 (Shazeer and Stern, 2018). Plain SGD is scaled by gradients,
which are clipped to a norm of 1.
"""

LARGE_BATCH = 4096
"""Rows of a step above which a fine-tuning takes few steps and learns little. Published: 16 and 32 (Devlin et al.,
2018), 64 (Touvron et al., Llama 2, 2023, instructions), 128 (Raffel et al., T5, 2020), 1,024 (Ouyang et al., 2022).
"""
ENCODERS = ("bert", "electra", "longformer", "mpnet", "minilm")
"""Parts of names of models without a decoder; BERT stands for RoBERTa, DeBERTa, DistilBERT and ModernBERT, too."""
WRITING: Mapping[Task, str] = {
    "text-generation": "gpt2 or Qwen/Qwen2.5-0.5B",
    "preference-tuning": "Qwen/Qwen2.5-0.5B-Instruct",
    "summarization": "google-t5/t5-small",
    "translation": "google-t5/t5-small",
}
"""Tasks whose answers are written, with small models that can."""
MOST_NOTICES = 20
"""Told of one job; they go into the status of an object, and nobody reads more."""


def notices(spec: FineTuneJobSpec) -> tuple[str, ...]:
    """Sentences without their full stops, each with its field."""
    settled = settle(spec)
    more = len(settled.notes) - MOST_NOTICES
    rest = (f"{more} more settings are passed over or taken as fields",) if more > 0 else ()
    return (*settled.notes[:MOST_NOTICES], *rest, *_unusual(settled.spec))


def _unusual(spec: FineTuneJobSpec) -> Iterator[str]:
    training = spec.training
    if training is None or spec.script is not None:
        return
    adapter = spec.model.adapter
    if adapter.method == "none" and adapter.model_fields_set and "method" not in adapter.model_fields_set:
        yield (
            "spec.model.adapter has no method, so that all weights are trained; method: lora, dora or qlora trains an "
            "adapter"
        )
    name = spec.model.uri.rpartition("/")[2].lower()
    if (
        spec.task in WRITING
        and "2bert" not in name
        and (encoder := next((each for each in ENCODERS if each in name), None)) is not None
    ):
        yield (
            f"spec.model.uri: {spec.model.uri} is called after {encoder}, whose models read text and write none; "
            f"{spec.task} needs a model that writes, such as {WRITING[spec.task]}"
        )
    most = HIGH_RATES[training.optimizer]
    if training.learning_rate > most:
        yield (
            f"spec.training.learningRate: {training.learning_rate:g} is very high for {training.optimizer}, with which "
            f"training above {most:g} usually diverges; the default is 2e-5"
        )
    if training.global_batch_size > LARGE_BATCH:
        yield (
            f"spec.training.globalBatchSize: {training.global_batch_size:,} rows a step are very many for fine-tuning, "
            f"where 16 to 1,024 are usual; a train split with fewer rows is refused; the default is 32"
        )
