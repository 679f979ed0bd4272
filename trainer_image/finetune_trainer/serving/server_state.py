"""State that the handlers of a server share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from finetune_trainer.serving.batcher import Batcher
from finetune_trainer.serving.serving_engine import ServingEngine
from finetune_trainer.serving.serving_metrics import ServingMetrics


@dataclass
class ServerState:
    """State of one server."""

    engine: ServingEngine
    batcher: Batcher
    metrics: ServingMetrics
    token: str | None
    revision: str
    endpoint_revision: str | None = None
    """Number of the endpoint's revision that the server belongs to."""
    local: bool = False
    """True if only programs of this machine reach the server."""
    draining: bool = False
    in_flight: int = 0
    started: float = field(default_factory=time.time)

    def revision_of(self, model: str) -> str:
        """Return the revision of a loaded model."""
        return self.engine.models[model].revision or self.revision

    @property
    def ready(self) -> bool:
        """True if requests should be sent here: after the warm-up, until it drains."""
        return self.batcher.ready and not self.draining
