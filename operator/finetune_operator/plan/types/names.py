"""Names of a job's children, computed once.

Kubernetes allows job names of up to 63 characters that begin with a digit, but children become pod host names and
Services, which have to be DNS-1035 labels of at most 63 characters, and training operators append `-worker-<index>` or
`-master-0` to theirs. So a long name, or one that does not begin with a letter, is truncated and gets a hash of the
full name: two jobs never share a child.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from finetune_contract.choices import Stage
from finetune_operator.spec.launcher_rows import LONGEST_POD_SUFFIX

LABEL_LIMIT = 63
"""Most characters of a label: RFC 1035, section 2.3.4."""
ATTEMPT_SUFFIX = len("-evaluate-99999")
"""Length of the suffix of the longest stage name with a five-digit attempt."""
BASE_LIMIT = LABEL_LIMIT - LONGEST_POD_SUFFIX - ATTEMPT_SUFFIX
HASH_LENGTH = 8
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True)
class JobNames:
    """Names of one job's children."""

    job: str
    base: str
    """Common prefix: the job's name if it is short and begins with a letter."""

    @classmethod
    def of(cls, job: str) -> JobNames:
        """Return the names for the job called `job`, any name that Kubernetes allows."""
        if len(job) <= BASE_LIMIT and _LABEL.fullmatch(job):
            return cls(job, job)
        digest = hashlib.sha256(job.encode()).hexdigest()[:HASH_LENGTH]
        plain = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")
        letters = plain if plain[:1].isalpha() else f"j-{plain}"
        return cls(job, f"{letters[: BASE_LIMIT - HASH_LENGTH - 1].rstrip('-')}-{digest}")

    def stage(self, stage: Stage, attempt: int) -> str:
        """Name the object that runs attempt `attempt` (1 to 99,999) of `stage`."""
        if not 1 <= attempt <= 99_999:
            raise ValueError(f"attempt {attempt} is outside 1 to 99999")
        return f"{self.base}-{stage.value}-{attempt}"

    @property
    def claim(self) -> str:
        """Name the claim that the operator creates if `storage.workspace` is left out."""
        return f"{self.base}-workspace"

    @property
    def network_policy(self) -> str:
        """Name the NetworkPolicy of the job's pods."""
        return f"{self.base}-network"

    @property
    def endpoint(self) -> str:
        """Name the objects that all revisions of an endpoint share; the Service if the endpoint has no other name."""
        return f"{self.base}-endpoint"

    def endpoint_service(self, name: str | None) -> str:
        """Name the Service of the servers; `name` is that of the endpoint, if it differs from the job's."""
        return self.endpoint if name is None else f"{name}-endpoint"

    def servers(self, revision: int) -> str:
        """Name servers and ConfigMap of a revision (1 to 99,999) of the endpoint, and the Service of a canary."""
        return f"{self.endpoint}-{revision}"

    def predictor(self, revision: int) -> str:
        """Name the Deployment and the Service that KServe creates for the InferenceService of a revision."""
        return f"{self.servers(revision)}-predictor"

    def service(self, attempt: int) -> str:
        """Name the headless Service through which the processes of a training attempt find each other."""
        return f"{self.stage(Stage.TRAIN, attempt)}-ranks"
