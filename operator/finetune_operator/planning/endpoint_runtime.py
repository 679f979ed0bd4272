"""Choice of the endpoint's runtime: a Deployment, or a KServe InferenceService in Standard mode.

KServe copies labels and annotations to pods and reads some variables of a container as its own settings. A job that
uses those itself is served by a Deployment.
"""

from __future__ import annotations

from finetune_operator.api.types import EndpointSpec
from finetune_operator.launchers.kserve_kind import (
    KSERVE_API,
    KSERVE_GROUP,
    KSERVE_KIND,
    RESERVED_LABELS,
    RESERVED_VARIABLES,
)
from finetune_operator.planning.draft import Draft
from finetune_operator.planning.names import LABEL_LIMIT, JobNames
from finetune_operator.planning.plan_types import EndpointRuntime


def choose_runtime(draft: Draft, endpoint: EndpointSpec) -> tuple[Draft, EndpointRuntime, str]:
    """Return the runtime of the servers, and the reason."""
    asked, obstacle = endpoint.runtime, _obstacle(draft)
    path, there = ("endpoint", "runtime"), draft.inputs.facts.runtime_there
    match asked:
        case "deployment":
            return draft, "deployment", "as asked"
        case "kserve":
            known = len(draft.problems)
            if not draft.inputs.facts.kserve:
                rule, hint = f"the cluster has to serve {KSERVE_KIND} ({KSERVE_API})", "install KServe, or set it to"
                draft = draft.refusing(path, asked, rule, f"{hint} auto or deployment", "NotSupported")
            elif obstacle is not None:
                draft = draft.refusing(path, asked, obstacle, "set it to deployment", "NotSupported")
            if len(draft.problems) > known and endpoint.kserve_runtime is not None:
                named = ("endpoint", "kserveRuntime")
                rule = "needs KServe, by which this job cannot be served"
                draft = draft.refusing(named, endpoint.kserve_runtime, rule, "leave it out", "NotSupported")
            return draft, "kserve", "as asked"
        case "auto":
            automatic = "(spec.endpoint.runtime is auto)"
            if not draft.inputs.facts.kserve:
                return draft, "deployment", f"the cluster is not known to serve KServe's {KSERVE_KIND} {automatic}"
            if obstacle is not None:
                return draft, "deployment", f"not by KServe, as {obstacle} {automatic}"
            if there == "deployment":
                return draft, "deployment", f"the endpoint runs so already, and KServe came later {automatic}"
            return draft, "kserve", f"the cluster serves {KSERVE_KIND} {automatic}"


def _obstacle(draft: Draft) -> str | None:
    """Return the first requested setting that conflicts with KServe; None if there is none."""
    if draft.spec.endpoint is not None and draft.spec.endpoint.traffic is not None:
        return "spec.endpoint.traffic needs a Deployment"
    if draft.spec.endpoint is not None and draft.spec.endpoint.idle is not None:
        return "spec.endpoint.idle needs a Deployment"
    template = draft.spec.template
    variables = [name for one in template.env if (name := one.get("name")) in RESERVED_VARIABLES]
    if variables:
        return f"KServe takes the variable {variables[0]} of spec.template.env for itself"
    named = (*template.labels, *template.annotations)
    labels = [name for name in named if name.startswith(f"{KSERVE_GROUP}/") or name in RESERVED_LABELS]
    if labels:
        return f"KServe sets {labels[0]} of spec.template on pods itself"
    # 99: room for two digits of the revision.
    namespace, name = draft.job.metadata.namespace or "", JobNames.of(draft.job.name).predictor(99)
    if len(name) + 1 + len(namespace) > LABEL_LIMIT:
        return f"the host {name}-{namespace} that KServe names is longer than {LABEL_LIMIT} characters"
    return None
