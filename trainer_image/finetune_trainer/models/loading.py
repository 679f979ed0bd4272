"""From the model URI of a job to a config, a tokenizer and weights.

Refuses to run code that comes with a model unless the job sets `trustRemoteCode`, and refuses folders without a model
before a library can guess their content. Errors of the Hub are classified: not reachable (retry) or not found (do not).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_contract.data_settings import ModelSource
from finetune_contract.layout import FailureClass
from finetune_contract.metrics import JUDGED_AFTER_TRAINING, WRITING
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError, chain
from finetune_trainer.core.uris import Uri, hub_name, local_path, package_path
from finetune_trainer.models.hub_revisions import commit_of
from finetune_trainer.models.tokenizer_limits import is_panic, refuse_bomb

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_FIELD = "model.uri"
MODEL_CARD = "README.md"
NEEDED_TOKENS = ("pad_token", "mask_token")
"""Special tokens that are put into batches, whether a row has them or not."""
_NO_REVISION = "main"
"""Revision in the contract when the job names none."""
DEFAULT_LENGTH_LIMIT = 512
"""Truncation length in tokens when the job gives none: that of most encoders' training. Longer costs quadratic
attention.
"""

DEFAULT_STRIDE = 128
"""Tokens that neighbouring windows share when the job gives none, or a quarter of short windows."""
_OF_WORDS = ("token-classification",)

# Models whose first position is padding index + 1, so that they hold fewer tokens than max_position_embeddings.
_POSITIONS_AFTER_PADDING = frozenset(
    {
        "camembert",
        "data2vec-text",
        "ibert",
        "longformer",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
_REFUSED = (401, 403)
"""HTTP statuses that the same token would receive again."""
_SAMPLED_ELEMENTS = 1024
"""Elements read of each weight to tell two models apart: training changes all weights, and reading them all takes long.
"""
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
"""Names of weight files as `save_pretrained` writes them."""


def resolve_model(
    uri: str, revision: str = _NO_REVISION, trust_remote_code: bool = False
) -> tuple[str, dict[str, Any]]:
    """Return `(name_or_path, kwargs)` for `from_pretrained`.

    Raise StageError MODEL `ModelNotFound` for a missing path, `NotAModel` for one without a model, CONFIG
    `SchemeNotSupported` for other schemes and `RevisionWithoutHub` for a revision of a model that is not on the Hub.
    """
    parsed = Uri.parse(uri, _FIELD)
    match parsed.scheme:
        case "hf":
            name = hub_name(parsed.rest.rstrip("/"), parsed, _FIELD)
            return name, {"revision": commit_of(name, revision) or revision, "trust_remote_code": trust_remote_code}
        case "file":
            path = local_path(parsed)
        case "pkg":
            path = package_path(parsed, _FIELD, FailureClass.MODEL, "ModelNotFound")
        case _:
            raise StageError(
                FailureClass.CONFIG,
                "SchemeNotSupported",
                f"{_FIELD} is {uri!r}; supported schemes for models are hf://, file:// and pkg://.",
                "Copy the model to the workspace and use file://.",
            )
    _check_folder(path, uri)
    if revision != _NO_REVISION:
        raise StageError(
            FailureClass.CONFIG,
            "RevisionWithoutHub",
            f"model.revision is {revision!r}, but {uri} is not on the Hub; only Hub models have revisions.",
            "Leave model.revision out, or use hf://.",
        )
    return str(path), {"trust_remote_code": trust_remote_code, "local_files_only": True}


def model_file(source: ModelSource, name: str) -> Path | None:
    """Return a file beside the weights that a model may lack; None if it is not on this machine."""
    from huggingface_hub import try_to_load_from_cache

    uri = Uri.parse(source.uri, _FIELD)
    if uri.scheme == "hf":
        cached = try_to_load_from_cache(hub_name(uri.rest.rstrip("/"), uri, _FIELD), name, revision=source.revision)
        return Path(cached) if isinstance(cached, str) else None
    file = Path(resolve_model(source.uri, source.revision)[0]) / name
    return file if file.is_file() else None


def fetch_card(source: ModelSource) -> None:
    """Fetch the card of a Hub model, if it has one: loading the model does not. Later stages may not reach the Hub."""
    from huggingface_hub import hf_hub_download

    if source.uri.startswith("hf://"):
        name, arguments = resolve_model(source.uri, source.revision)
        try:
            hf_hub_download(name, MODEL_CARD, revision=arguments["revision"])
        except Exception:  # the client's errors have no common base but Exception
            log.debug("%s has no card.", name, exc_info=True)


def pinned(job: TrainerJob) -> tuple[TrainerJob, str | None]:
    """Return the job with the current commit of its Hub model in place of a branch or tag, and that commit.

    A branch may move while a job runs; a commit does not. The job is unchanged for other models and when the Hub gives
    no commit: loading then reports the error.
    """
    if Uri.parse(job.model.uri, _FIELD).scheme != "hf":
        return job, None
    name, _ = resolve_model(job.model.uri, job.model.revision)
    commit = commit_of(name, job.model.revision)
    if commit is None:
        return job, None
    return job.model_copy(update={"model": job.model.model_copy(update={"revision": commit})}), commit


def _check_folder(path: Path, uri: str) -> None:
    if not path.exists():
        raise StageError(
            FailureClass.MODEL,
            "ModelNotFound",
            f"{_FIELD} is {uri!r}, but {path.absolute()} does not exist.",
            "Use a folder with config.json and weights; file://path is relative to the job file's folder.",
        )
    if path.is_dir() and (path / "config.json").is_file():
        return
    if (path / "adapter_config.json").is_file():
        raise StageError(
            FailureClass.MODEL,
            "NotAModel",
            f"{_FIELD} is {uri!r}, but {path.absolute()} is an adapter: a model is a folder with config.json.",
            "Use the merged model: model/ of the run that trained the adapter.",
        )
    description = (
        "is a file" if path.is_file() else f"holds {', '.join(sorted(p.name for p in path.iterdir())[:8]) or 'nothing'}"
    )
    raise StageError(
        FailureClass.MODEL,
        "NotAModel",
        f"{_FIELD} is {uri!r}, but {path.absolute()} {description}: a model is a folder with config.json.",
        "Use the folder that `save_pretrained` wrote.",
    )


def load_config(job: TrainerJob) -> PretrainedConfig:
    """Load the model's config; errors as `resolve_model`, and those of the Hub."""
    from transformers import AutoConfig

    name, kwargs = resolve_model(job.model.uri, job.model.revision, job.model.trust_remote_code)
    _refuse_remote_code(Path(name), job.model)
    try:
        config = AutoConfig.from_pretrained(name, **kwargs)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise load_error(job.model, error) from error
    loaded: PretrainedConfig = config
    return loaded


def load_tokenizer(job: TrainerJob) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, with a padding token (the end-of-sequence token where the model has none itself)."""
    from transformers import AutoTokenizer

    name, kwargs = resolve_model(job.model.uri, job.model.revision, job.model.trust_remote_code)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **kwargs)
        if job.task in _OF_WORDS and getattr(tokenizer, "add_prefix_space", None) is False:
            # These tasks pass words one by one, and byte-level tokenizers recognise a word by the space before it.
            tokenizer = AutoTokenizer.from_pretrained(name, add_prefix_space=True, **kwargs)
        if not isinstance(tokenizer.model_max_length, int | float):
            raise TypeError(f"its model_max_length is {tokenizer.model_max_length!r}, and must be a number")
        if tokenizer.is_fast:
            refuse_bomb(tokenizer.backend_tokenizer)
    except BaseException as error:
        # The Rust library raises Exception itself for files that it cannot read.
        known = isinstance(error, OSError | ValueError | KeyError | TypeError | RecursionError)
        if known or type(error) is Exception or is_panic(error):
            raise load_error(job.model, error, part="tokenizer") from error
        raise
    _prepend_space(tokenizer)
    if not len(tokenizer):
        raise load_error(job.model, ValueError("it has an empty vocabulary"), part="tokenizer")
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise load_error(
                job.model, ValueError("it has neither a padding nor an end-of-sequence token"), part="tokenizer"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def embedded_tokens(
    job: TrainerJob, config: Mapping[str, Any], vocabulary: Mapping[str, int], special: Collection[str]
) -> int | None:
    """Return the number of token ids that the model has embeddings of; None if its `config` does not say.

    Raise StageError MODEL `TokensWithoutEmbedding` if the tokenizer's `vocabulary` has ids beyond. Tokens of `special`
    may have such ids, as that of images in Gemma 3 does: rows that have them are refused later (`tokens_error`).
    """
    embedded = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    if not isinstance(embedded, int):
        return None
    beyond = [(id_, token) for token, id_ in vocabulary.items() if id_ >= embedded and token not in special]
    if beyond:
        id_, token = min(beyond)
        raise tokens_error(f"The tokenizer of {job.model.uri} has {len(vocabulary):,} tokens", token, id_, embedded)
    return embedded


def tokens_error(subject: str, token: str, id_: int, embedded: int) -> StageError:
    """Return the error for a token without an embedding. `subject`: where it is, as the begin of a sentence."""
    return StageError(
        FailureClass.MODEL,
        "TokensWithoutEmbedding",
        f"{subject}, and the model's embedding has {embedded:,} rows, for ids below {embedded:,}: {token!r} has the id "
        f"{id_:,}.",
        "Resize the embedding (`resize_token_embeddings` of transformers) and save model and tokenizer, or use the "
        "tokenizer that the model came with.",
    )


def tokenizer_embedded(job: TrainerJob, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return `embedded_tokens` of a loaded tokenizer. The tokens of `NEEDED_TOKENS` need an embedding."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special -= {getattr(tokenizer, name) for name in NEEDED_TOKENS}
    return embedded_tokens(job, config.to_dict(), tokenizer.get_vocab(), special)


def _prepend_space(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the tokenizer prepend the space to a text that its sentencepiece model requires.

    transformers 5.23 omits it where it builds a tokenizer from such a file alone and has no class for the family
    (Mistral's, for one): a text would begin with other tokens than in pre-training, and "The" be read as "T", "he".
    """
    from tokenizers import decoders, normalizers
    from transformers import TokenizersBackend
    from transformers.convert_slow_tokenizer import SentencePieceExtractor

    file, whole = str(tokenizer.init_kwargs.get("vocab_file")), getattr(tokenizer, "backend_tokenizer", None)
    if type(tokenizer) is not TokenizersBackend or whole is None or tokenizer.init_kwargs.get("tokenizer_file"):
        return
    # A tokenizer read from a file of tiktoken has a pre-tokenizer.
    if not file.endswith(".model") or whole.pre_tokenizer is not None or whole.normalizer is None:
        return
    if SentencePieceExtractor(file).proto.normalizer_spec.add_dummy_prefix:
        whole.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), whole.normalizer])
        whole.decoder = decoders.Sequence([whole.decoder, decoders.Strip(" ", 1, 0)])


def position_limit(config: PretrainedConfig) -> int | None:
    """Return the model's longest input in tokens; None when its config sets no limit."""
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    if config.model_type in _POSITIONS_AFTER_PADDING:
        return positions - (getattr(config, "pad_token_id", None) or 0) - 1
    return positions


def truncation_length(job: TrainerJob, config: PretrainedConfig) -> int:
    """Return the truncation length in tokens; raise StageError CONFIG `MaxLengthTooLong` when the job asks for more
    than the model holds.
    """
    limit = position_limit(config)
    requested = job.preparation.max_length
    if requested is None:
        return min(limit or DEFAULT_LENGTH_LIMIT, DEFAULT_LENGTH_LIMIT)
    if limit is not None and requested > limit:
        raise StageError(
            FailureClass.CONFIG,
            "MaxLengthTooLong",
            f"preparation.maxLength is {requested}, but {job.model.uri} holds at most {limit} tokens.",
            f"Set preparation.maxLength to {limit} or less, or leave it out.",
        )
    return requested


def refuse_long_answers(job: TrainerJob, config: PretrainedConfig) -> None:
    """Raise StageError CONFIG `AnswersTooLong` if evaluation or prediction would write more tokens than the model has
    positions for; an answer of a decoder shares them with the prompt.
    """
    positions, asked = position_limit(config), job.generation.max_new_tokens
    judged = job.task in JUDGED_AFTER_TRAINING and (job.evaluation is not None or job.training is not None)
    writes = judged or (job.predict is not None and job.task in WRITING)
    alone = bool(config.is_encoder_decoder)
    if writes and positions is not None and asked > positions - (not alone):
        raise StageError(
            FailureClass.CONFIG,
            "AnswersTooLong",
            f"generation.maxNewTokens is {asked}, and {job.model.uri} holds {positions} tokens"
            f"{'' if alone else ', including the prompt'}.",
            f"Set generation.maxNewTokens to {positions - (not alone)} or less.",
        )


def window_stride(job: TrainerJob, max_length: int) -> int:
    """Return the tokens that neighbouring windows share; raise StageError CONFIG `StrideTooLong` for too many."""
    requested = job.preparation.stride
    if requested is None:
        return min(DEFAULT_STRIDE, max_length // 4)
    if requested > max_length // 2:
        raise StageError(
            FailureClass.CONFIG,
            "StrideTooLong",
            f"preparation.stride is {requested}; neighbouring windows of {max_length} tokens may share at most half of "
            "them.",
            f"Set preparation.stride to {max_length // 2} or less, or leave it out.",
        )
    return requested


def stored_bytes(name_or_path: str) -> int | None:
    """Return the size of a local model's weight files in bytes; None for one on the Hub."""
    for pattern in WEIGHT_FILES:
        sizes = [path.stat().st_size for path in Path(name_or_path).glob(pattern)]
        if sizes:
            return sum(sizes)
    return None


def weights_digest(model: PreTrainedModel, without: Sequence[str] = ()) -> str:
    """Hash the names, shapes and first elements of all weights but those of the modules `without`."""
    value = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if name.startswith(tuple(f"{module}." for module in without)):
            continue
        value.update(f"{name} {tuple(parameter.shape)} ".encode())
        value.update(parameter.detach().flatten()[:_SAMPLED_ELEMENTS].float().cpu().numpy().tobytes())
    return value.hexdigest()


def _refuse_remote_code(folder: Path, source: ModelSource) -> None:
    if source.trust_remote_code or not folder.is_dir():
        return
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # AutoConfig reports the error
    if isinstance(config, dict) and "auto_map" in config and not _known_type(config.get("model_type")):
        raise _remote_code_error(source)


def _known_type(model_type: object) -> bool:
    from transformers import CONFIG_MAPPING

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def _remote_code_error(source: ModelSource) -> StageError:
    return StageError(
        FailureClass.MODEL,
        "RemoteCodeNotTrusted",
        f"{_FIELD} is {source.uri!r}, a model that runs Python code of its own, and model.trustRemoteCode is false.",
        "Read that code; set model.trustRemoteCode to true if you trust it.",
    )


def load_error(source: ModelSource, error: BaseException, part: str = "model") -> StageError:
    """Return the StageError for a failed `from_pretrained` of `source`."""
    hub = (
        hub_error(source.uri, _FIELD, FailureClass.MODEL, "ModelNotFound", error)
        if source.uri.startswith("hf://")
        else None
    )
    if hub is not None:
        return hub
    if "trust_remote_code" in str(error):
        return _remote_code_error(source)
    if "does not recognize this architecture" in str(error):
        return StageError(
            FailureClass.MODEL,
            "UnknownArchitecture",
            f"{_FIELD} is {source.uri!r}, an architecture that the installed transformers does not support: "
            f"{_first_line(error)}",
            "Use an image with a newer transformers, or another model.",
        )
    return StageError(
        FailureClass.MODEL,
        "NotAModel",
        f"{_FIELD} is {source.uri!r}, and its {part} cannot be loaded: {_first_line(error)}",
        "The folder must hold what `save_pretrained` writes: config.json, weights, tokenizer files.",
    )


def hub_error(
    uri: str, field: str, missing_class: FailureClass, missing_reason: str, error: BaseException
) -> StageError | None:
    """Return the StageError for an error of the Hub in the chain of `error`; None when the Hub is not the cause.

    HUB_UNAVAILABLE when it cannot be reached, `missing_class` when it answers that the repository or revision does not
    exist or is not open to us.
    """
    from huggingface_hub import errors

    links = chain(error)

    def found(*types: type[BaseException]) -> bool:
        return any(isinstance(link, types) for link in links)

    token_hint = (
        "Check the name; a private or gated repository needs secrets.hubToken of an account that was granted access."
    )
    if found(errors.GatedRepoError):
        return StageError(
            missing_class, "GatedRepository", f"{field} is {uri!r}, and its owner grants access by request.", token_hint
        )
    if found(errors.RevisionNotFoundError):
        return StageError(
            missing_class,
            "RevisionNotFound",
            f"{field} is {uri!r}: the Hub has no such revision.",
            "Check the revision.",
        )
    if found(errors.RepositoryNotFoundError):
        return StageError(
            missing_class, missing_reason, f"{field} is {uri!r}: the Hub has no such repository.", token_hint
        )
    if found(errors.EntryNotFoundError) and not found(errors.LocalEntryNotFoundError):
        return None  # The repository exists; it only lacks a file.
    if any(isinstance(link, errors.HfHubHTTPError) and link.response.status_code in _REFUSED for link in links):
        return StageError(
            missing_class,
            "TokenRefused",
            f"{field} is {uri!r}, and the Hub rejected the token.",
            "Put a valid token with read access into the Secret of secrets.hubToken.",
        )
    if found(*_unreachable()) or "couldn't connect" in str(error).lower() or "couldn't reach" in str(error).lower():
        return StageError(
            FailureClass.HUB_UNAVAILABLE,
            "HubUnavailable",
            f"{field} is {uri!r}, but the Hub cannot be reached: {_first_line(error)}",
            "Try again; without a network (HF_HUB_OFFLINE=1) use file:// or pkg://, or fill the cache beforehand.",
        )
    return None


def _unreachable() -> tuple[type[BaseException], ...]:
    """Return the errors of an unreachable Hub, for `hub_error`, which has ruled out the answers it knows."""
    from huggingface_hub import errors

    # The HTTP library below huggingface_hub differs between its versions; HfHubHTTPError shares
    # a base with all errors of it.
    http_error = errors.HfHubHTTPError.__mro__[1]
    return (
        errors.OfflineModeIsEnabled,
        errors.LocalEntryNotFoundError,
        errors.HfHubHTTPError,
        http_error,
        ConnectionError,
        TimeoutError,
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
