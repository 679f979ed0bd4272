"""Writes every generated file anew; the drift tests compare them. Run by `make generate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from chart_files import (
    chart_readme,
    chart_rights,
    overlay_dashboards,
    overlay_rights,
    overlay_rules,
    values_schema,
)
from example_heads import table, with_head
from examples import EXAMPLES
from finetune_operator.api.crd import crd_yaml
from finetune_operator.api.docs import api_reference, names_reference, settings_reference
from finetune_operator.cli.main import COMMANDS, app
from finetune_operator.shell import metrics
from finetune_trainer.strategies.tensor import tensor_families_json
from finetune_trainer.training.arguments import known_arguments_json
from support_matrix import support_matrix


def command_reference() -> str:
    """What `--help` says of each command."""
    from typer.testing import CliRunner

    runner = CliRunner(env={"COLUMNS": "110", "TERM": "dumb", "NO_COLOR": "1"})
    parts = ["# The `finetune` command\n\nAlso `kubectl finetune`. What `--help` says, command by command.\n"]
    for command in COMMANDS:
        said = runner.invoke(app, [command, "--help"], prog_name="finetune").output
        text = "\n".join(line.rstrip() for line in said.strip().splitlines())
        parts.append(f"## finetune {command}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def argo_health() -> str:
    """The health check as Argo CD's own ConfigMap takes it, to be merged into the one that is there."""
    lua = (ROOT / "manifests" / "gitops" / "argocd" / "health.lua").read_text(encoding="utf-8")
    indented = "".join(f"    {line}\n" if line else "\n" for line in lua.splitlines())
    return f"""# Made from health.lua. Merge it into Argo CD's own settings:
#
#   kubectl -n argocd patch configmap argocd-cm --patch-file argocd-cm.yaml
apiVersion: v1
kind: ConfigMap
metadata:
  name: argocd-cm
  namespace: argocd
  labels:
    app.kubernetes.io/part-of: argocd
data:
  resource.customizations.health.finetune.dev_FineTuneJob: |
{indented}"""


ROOT = Path(__file__).parents[1]


def between_marks(path: str, made: Callable[[], str]) -> Callable[[], str]:
    """The file as it is, with what is made anew between its two marks."""

    def whole() -> str:
        head, begin, rest = (ROOT / path).read_text(encoding="utf-8").partition("<!-- generated: make generate -->\n")
        _, end, tail = rest.partition("<!-- end of what is generated -->\n")
        assert begin, f"{path} has no mark where the generated part begins"
        assert end, f"{path} has no mark where the generated part ends"
        return f"{head}{begin}\n{made()}\n{end}{tail}"

    return whole


GENERATED: dict[str, Callable[[], str]] = {
    "manifests/crd/finetune.dev_finetunejobs.yaml": crd_yaml,
    "charts/finetune-operator/files/crd.yaml": crd_yaml,
    "charts/finetune-operator/files/rights.yaml": chart_rights,
    "charts/finetune-operator/values.schema.json": values_schema,
    "charts/finetune-operator/README.md": chart_readme,
    "manifests/overlays/namespaced/rbac.yaml": overlay_rights,
    "manifests/overlays/monitoring/rules.yaml": overlay_rules,
    "manifests/overlays/monitoring/dashboards.yaml": overlay_dashboards,
    "docs/api.md": api_reference,
    "docs/settings.md": settings_reference,
    "docs/names.md": names_reference,
    "docs/commands.md": command_reference,
    "docs/support.md": support_matrix,
    "manifests/gitops/argocd/argocd-cm.yaml": argo_health,
    "manifests/examples/README.md": between_marks("manifests/examples/README.md", table),
    **{f"manifests/examples/{name}.yaml": with_head(name) for name in EXAMPLES},
    "docs/metrics.md": between_marks("docs/metrics.md", metrics.reference),
    "trainer_image/contract/finetune_contract/training_arguments.json": known_arguments_json,
    "trainer_image/contract/finetune_contract/tensor_families.json": tensor_families_json,
}


def main() -> None:
    for path, content in GENERATED.items():
        file = ROOT / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content(), encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
