"""Sign a job's checkpoints with a key that is not on the job's volume.

A process that can write to the volume can replace a checkpoint, hashes and all, but cannot sign it. The key comes from
a Secret through an environment variable; it is never written to disk or logged.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from finetune_contract.layout import ENV_CHECKPOINT_SECRET, FailureClass
from finetune_contract.trainer_job import CheckpointSchedule
from finetune_trainer.core.failures import StageError

LEAST_KEY_BYTES = 16
"""Least length of a key: 128 bits. RFC 2104 advises the hash's, 32 bytes; `openssl rand -hex 32` gives 64 digits."""
_DOMAIN = b"finetune checkpoint 1\n"
"""Prefix that separates these signatures from others of the same key."""


@dataclass(frozen=True)
class Signer:
    """HMAC-SHA256 (RFC 2104) over a manifest, for one job: checkpoints of another job with the same key are refused."""

    key: bytes = field(repr=False)
    job: str

    def sign(self, content: bytes) -> str:
        """Return the signature of `content`, 64 hexadecimal digits."""
        return hmac.new(self.key, _DOMAIN + self.job.encode() + b"\n" + content, hashlib.sha256).hexdigest()

    def has_signed(self, content: bytes, signature: str) -> bool:
        """Return whether `signature` is that of `content`, in constant time."""
        return hmac.compare_digest(self.sign(content).encode(), signature.encode())


def signer_of(job: str, schedule: CheckpointSchedule, environment: Mapping[str, str]) -> Signer | None:
    """Return the signer of that job's checkpoints; None where they are not signed. Raise StageError CONFIG
    `SigningKeyMissing` without a key, and `SigningKeyTooShort`. White space around the key does not count.
    """
    if not schedule.signed:
        return None
    key = environment.get(ENV_CHECKPOINT_SECRET, "").strip().encode(errors="surrogateescape")
    if not key:
        raise StageError(
            FailureClass.CONFIG,
            "SigningKeyMissing",
            f"checkpoints.signingKey is set, and the environment variable {ENV_CHECKPOINT_SECRET} holds no key.",
            "Put a key into the Secret; without a cluster set the variable.",
        )
    if len(key) < LEAST_KEY_BYTES:
        raise StageError(
            FailureClass.CONFIG,
            "SigningKeyTooShort",
            f"The key of checkpoints.signingKey has {len(key)} bytes; it must have {LEAST_KEY_BYTES} or more.",
            "Create one with `openssl rand -hex 32`.",
        )
    return Signer(key, job)
