"""kopf's side of admission without a cluster: the function that kopf gives to an admission server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import kopf
from kopf._cogs.structs.ephemera import AnyMemo
from kopf._cogs.structs.references import Insights, Resource
from kopf._core.engines.admission import serve_admission_request
from kopf._core.engines.indexing import OperatorIndexers
from kopf._core.reactor.inventory import ResourceMemories

from finetune_operator.controller import handlers  # noqa: F401
from finetune_operator.controller.lifecycle import judged
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import GROUP, KIND, PLURAL, VERSION


class Judging:
    """An operator, as far as the handler of admission uses one."""

    def __init__(self, settings: Settings) -> None:
        self.judge = partial(judged, settings=settings)


def answering(settings: Settings) -> Callable[[dict[str, Any]], Awaitable[Any]]:
    """Return kopf's function for our registered handlers: AdmissionReview -> AdmissionReview."""
    insights = Insights()
    resource = Resource(GROUP, VERSION, PLURAL, kind=KIND, namespaced=True, verbs=frozenset({"list", "watch"}))
    insights.webhook_resources.add(resource)
    answer: Any = partial(
        serve_admission_request,
        settings=kopf.OperatorSettings(),
        registry=kopf.get_default_registry(),
        insights=insights,
        memories=ResourceMemories(),
        memobase=AnyMemo(kopf.Memo(operator=Judging(settings))),
        indices=OperatorIndexers().indices,
    )
    return answer
