"""Writes every generated file anew; the drift tests compare them. Run by `make generate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from finetune_operator.api.crd import crd_yaml
from finetune_operator.api.docs import api_reference, settings_reference
from finetune_operator.shell import metrics
from finetune_trainer.training.arguments import known_arguments_json

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
    "docs/api.md": api_reference,
    "docs/settings.md": settings_reference,
    "docs/metrics.md": between_marks("docs/metrics.md", metrics.reference),
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
