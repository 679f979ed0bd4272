"""Commits of Hub models, and the cache in place of a Hub that cannot be reached.

The Hub's client repeats each question to an unreachable Hub for some 23 seconds, and a model takes five or more
questions even if all of its files are cached. So one short question per process decides: where it finds no Hub and the
cache has the model, nothing else is requested.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from pathlib import Path

from finetune_trainer.core.library_patches import hub_offline

log = logging.getLogger(__name__)

PROBE_SECONDS = 10.0
"""Time in which a reachable Hub answers: that of the Hub's client for the facts of a file (HF_HUB_ETAG_TIMEOUT)."""
_CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Names of files with weights, in the order in which transformers looks for them."""
_BUSY, _DOWN = 429, 500
"""HTTP status of too many requests, and the lowest one of a server that fails; by others the Hub has answered."""
_known: dict[tuple[str, str], str] = {}
"""Commits by repository and revision: all files of a process are of one commit."""


def commit_of(repository: str, revision: str) -> str | None:
    """Return the commit of a model's revision: that of the Hub or, where it cannot be reached, the cached one.

    The second is logged, and the process requests nothing from the Hub from then on. None if neither has it: loading
    then reports the error.
    """
    if (repository, revision) not in _known:
        commit = _resolved(repository, revision)
        if commit is None:
            return None
        _known[repository, revision] = commit
    return _known[repository, revision]


def _resolved(repository: str, revision: str) -> str | None:
    from huggingface_hub import HfApi, is_offline_mode

    cached = _cached_commit(repository, revision)
    if is_offline_mode():
        return cached
    if cached is not None and (why := _unreachable(repository, revision)) is not None:
        _use_the_cache(repository, revision, cached, why)
        return cached
    try:
        # Also records the commit in the cache, for a time without the Hub.
        commit: str = HfApi().resolve_revision(repository, revision=revision).resolved
        return commit
    except Exception:  # loading reports it, with the reason
        log.debug("%s has no known commit of %s.", repository, revision, exc_info=True)
        return None


def _cached_commit(repository: str, revision: str) -> str | None:
    """Return the commit of a revision of which the cache has config and weights; a download may have been cut off."""
    from huggingface_hub import HfApi

    try:
        commit: str = HfApi().resolve_revision(repository, revision=revision, local_files_only=True).resolved
    except Exception:  # the client has no common base for "not cached", "no such name" and a broken cache
        return None
    return commit if _cached(repository, commit, _CONFIG) is not None and _has_weights(repository, commit) else None


def _has_weights(repository: str, commit: str) -> bool:
    """Return whether the cache has a file with all weights, or each file that an index lists."""
    for whole in _WEIGHTS:
        if _cached(repository, commit, whole) is not None:
            return True
        if (index := _cached(repository, commit, f"{whole}.index.json")) is not None:
            try:
                files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                return False  # loading reports it
            return all(_cached(repository, commit, file) is not None for file in files)
    return False


def _cached(repository: str, commit: str, file: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(repository, file, revision=commit)
    return Path(cached) if isinstance(cached, str) else None


def _unreachable(repository: str, revision: str) -> str | None:
    """Return the reason if the Hub cannot be reached; None if it answers, be it with a refusal."""
    from huggingface_hub import HfApi, errors

    try:
        HfApi().repo_info(repository, revision=revision, timeout=PROBE_SECONDS)
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        return f"it answers with HTTP status {status}" if status >= _DOWN or status == _BUSY else None
    except Exception as error:  # the HTTP library below the client differs between its versions
        return f"{type(error).__name__}: {error}"
    return None


def _use_the_cache(repository: str, revision: str, commit: str, why: str) -> None:
    from huggingface_hub import constants

    config = _cached(repository, commit, _CONFIG)
    assert config is not None, "a cached commit has a config"
    since = datetime.fromtimestamp(config.lstat().st_mtime, UTC)
    log.warning(
        "The Hub (%s) cannot be reached (%s). The cached model %s is used: revision %s as of commit %s, cached %s UTC; "
        "nothing else is requested from the Hub.",
        constants.ENDPOINT, why, repository, revision, commit, f"{since:%Y-%m-%d %H:%M}",
    )  # fmt: skip
    hub_offline.until_end(_known.clear)
