"""Models with a head, as the Auto classes of transformers build them: the code that all tasks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from finetune_contract.layout import FailureClass
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.models.loading import load_error, load_tokenizer, resolve_model
from finetune_trainer.tasks.task_protocol import Head

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel


def labels_of(config: PretrainedConfig, head: str) -> tuple[str, ...] | None:
    """Return the `id2label` of a checkpoint whose architecture ends in `head`; None for another one."""
    if not any(name.endswith(head) for name in config.architectures or ()):
        return None
    names = cast(dict[int, str], config.id2label or {})
    return tuple(str(names[i]) for i in range(len(names)))


def name_labels(config: PretrainedConfig, names: Sequence[str]) -> None:
    """Give the head one output for each of the names."""
    config.id2label = dict(enumerate(names))
    config.label2id = {name: i for i, name in enumerate(names)}


class AutoHead(Head):
    """Head of models that one of the Auto classes builds."""

    auto: str
    """Class of transformers that builds them, for example AutoModelForTokenClassification."""

    def refuse_packing(self, job: TrainerJob, config: PretrainedConfig) -> None:
        """Raise always: encoders read whole sequences."""
        raise packing_error(f"rows of {job.task} cannot share a sequence")

    def built(
        self, job: TrainerJob, config: PretrainedConfig, dtype: torch.dtype | None = None, *, new_outputs: bool = False
    ) -> PreTrainedModel:
        """Build the job's model for training; weights that its checkpoint lacks are drawn from the job's seed, and
        transformers logs their names. `new_outputs`: draw also those of the head's outputs, which are for other labels.
        Raise StageError MODEL for weights that belong to another model.
        """
        import torch

        name, arguments = resolve_model(job.model.uri, job.model.revision, job.model.trust_remote_code)
        seed = job.training.seed if job.training else job.seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                model, info = self._class().from_pretrained(
                    name,
                    config=config,
                    dtype=dtype or torch.float32,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                    **arguments,
                )
            except (OSError, ValueError, RuntimeError, KeyError) as error:
                raise load_error(job.model, error, part="weights") from error
            except Exception as error:  # safetensors raises its own class, which has no common base but Exception
                if type(error).__name__ == "SafetensorError":
                    raise load_error(job.model, error, part="weights") from error
                raise
            if new_outputs:
                torch.manual_seed(seed)
                _draw_outputs(model)
        _refuse_foreign_weights(job, model, info["missing_keys"])
        made: PreTrainedModel = model
        return made

    def empty_model(self, config: PretrainedConfig, labels: int) -> PreTrainedModel:
        """Build a model for counting parameters on the meta device."""
        name_labels(config, [str(i) for i in range(labels)])
        model: PreTrainedModel = self._class().from_config(config)
        return model

    def load_model(
        self, job: TrainerJob, name_or_path: str, arguments: Mapping[str, Any], dtype: torch.dtype
    ) -> PreTrainedModel:
        """Load a model; refuse a checkpoint whose head is missing: its answers would be random."""
        model, missing = self.load_incomplete(job, name_or_path, arguments, dtype)
        if missing:
            raise StageError(
                FailureClass.MODEL,
                "NoHead",
                f"{name_or_path} lacks the weights {', '.join(sorted(missing)[:4])}; its answers would be random.",
                f"Train it first (training: {{}}), or use a model that was trained for {job.task}.",
            )
        return model

    def load_incomplete(
        self, job: TrainerJob, name_or_path: str, arguments: Mapping[str, Any], dtype: torch.dtype
    ) -> tuple[PreTrainedModel, frozenset[str]]:
        """Load a model, and return also the names of the weights that its checkpoint lacks, which are random."""
        import torch

        try:
            model, info = self._class().from_pretrained(
                name_or_path, dtype=dtype, output_loading_info=True, **arguments
            )
        except torch.OutOfMemoryError:
            raise  # not a fault of the files, as other RuntimeErrors are
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise load_error(job.model, error, part="weights") from error
        loaded: PreTrainedModel = model
        return loaded, frozenset(info["missing_keys"])

    def _class(self) -> Any:
        import transformers

        return getattr(transformers, self.auto)


def packing_error(why: str, hint: str = "Set preparation.packing to never.") -> StageError:
    """Return the error for rows that cannot share a sequence."""
    return StageError(FailureClass.CONFIG, "PackingNotSupported", f"preparation.packing is on, and {why}.", hint)


def adopt_padding(job: TrainerJob, model: PreTrainedModel) -> None:
    """Set the padding token: decoders find a row's last token by it, and their config often lacks it."""
    if model.config.pad_token_id is None:
        model.config.pad_token_id = load_tokenizer(job).pad_token_id


def _draw_outputs(model: PreTrainedModel) -> None:
    """Initialize the layers behind the encoder that have an output for each label; all layers there if none has."""
    encoder = f"{model.base_model_prefix}."
    head = [
        (module, weights)
        for name, module in model.named_modules()
        if not f"{name}.".startswith(encoder) and (weights := [*module.parameters(recurse=False)])
    ]
    outputs = [(module, weights) for module, weights in head if len(weights[0]) == model.config.num_labels] or head
    for module, weights in outputs:
        for weight in weights:
            vars(weight)["_is_hf_initialized"] = False  # the functions of transformers leave others as they are
        model._init_weights(module)  # type: ignore[no-untyped-call]


def _refuse_foreign_weights(job: TrainerJob, model: PreTrainedModel, missing: Sequence[str]) -> None:
    """Refuse a checkpoint that fills less than half of the encoder: it belongs to another model. A missing pooler is
    common and fine.
    """
    prefix = f"{model.base_model_prefix}."
    encoder = [name for name, _ in model.named_parameters() if name.startswith(prefix)]
    absent = [name for name in missing if name.startswith(prefix)]
    if 2 * len(absent) > len(encoder):
        whole = f"{len(encoder)} tensors of {type(model).__name__}"
        why = f"they lack {len(absent)} of the {whole}, such as {sorted(absent)[0]}"
        raise load_error(job.model, ValueError(why), part="weights")
