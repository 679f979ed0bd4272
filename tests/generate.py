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
from finetune_operator.api.crd import crd_yaml
from finetune_operator.api.docs import api_reference, settings_reference
from finetune_trainer.training.arguments import known_arguments_json

ROOT = Path(__file__).parents[1]
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
    "trainer_image/contract/finetune_contract/training_arguments.json": known_arguments_json,
}


def main() -> None:
    for path, content in GENERATED.items():
        file = ROOT / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content(), encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
