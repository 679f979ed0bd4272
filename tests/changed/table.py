"""Uses of files that no import and no path shows: programs that tests start as processes, images, package data.

In patterns `*` also stands for `/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

PACKAGES = {
    "finetune_contract": "trainer_image/contract",
    "finetune_trainer": "trainer_image",
    "finetune_operator": "operator",
}
"""Folders of the product's packages; nested ones first."""
SCRIPTS = {
    "finetune": "finetune_operator.cli.main",
    "kubectl-finetune": "finetune_operator.cli.main",
    "finetune-operator": "finetune_operator.shell.command",
    "finetune-trainer": "finetune_trainer.__main__",
}
"""Modules of the installed programs."""

OPERATOR = "operator/finetune_operator"
TRAINER = "trainer_image/finetune_trainer"
CONTRACT = "trainer_image/contract/finetune_contract"


@dataclass(frozen=True)
class Link:
    """A use: each file that matches `users` needs each file that matches `needs`."""

    users: tuple[str, ...]
    needs: tuple[str, ...]
    why: str
    """Verb between the two, such as "starts"."""

    def is_user(self, path: str) -> bool:
        return any(fnmatchcase(path, pattern) for pattern in self.users)

    def is_needed(self, path: str) -> bool:
        return any(fnmatchcase(path, pattern) for pattern in self.needs)


@dataclass(frozen=True)
class Row:
    """Files with a common reason."""

    files: tuple[str, ...]
    why: str

    def matches(self, path: str) -> bool:
        return any(fnmatchcase(path, pattern) for pattern in self.files)


@dataclass(frozen=True)
class Table:
    """Rows of this file, or of a test."""

    links: Sequence[Link] = ()
    everything: Sequence[Row] = ()
    """Files whose change can break every test."""
    nothing: Sequence[Row] = ()
    """Files whose change breaks no test except those of `always`."""
    always: Sequence[Row] = ()
    """Tests that read all files, and run for any change."""


TABLE = Table(
    links=(
        Link(
            ("tests/e2e/local/*.py", "tests/cluster/test_readme_cluster.py", "tests/e2e/cluster/test_box_tour.py"),
            (f"{OPERATOR}/cli/main.py",),
            "starts",
        ),
        Link(("tests/e2e/local/test_gpu_check.py",), ("tests/gpu_check/*.py",), "starts"),
        Link(
            ("tests/e2e/conftest.py", "tests/trainer/test_examples_run.py"),
            (f"{TRAINER}/__main__.py",),
            "runs jobs, which start",
        ),
        Link(("tests/tracing/test_measured_gpus.py",), (f"{TRAINER}/rank.py",), "starts"),
        Link(
            (f"{TRAINER}/launching/launch.py",), (f"{TRAINER}/__main__.py", f"{TRAINER}/launching/elastic.py"), "starts"
        ),
        Link((f"{TRAINER}/scripts/program.py",), (f"{TRAINER}/scripts/site/*",), "starts programs that import"),
        Link(
            (
                "tests/e2e/local/test_readme.py",
                "tests/architecture/test_images.py",
                "tests/e2e/cluster/test_box_tour.py",
            ),
            ("Makefile", "images/build"),
            "runs commands of",
        ),
        Link(("tests/architecture/test_images.py",), ("images/*", "release/*"), "builds images by"),
        Link(("tests/architecture/test_release.py",), ("release/*", "charts/*", ".github/*"), "makes releases by"),
        Link(("tests/architecture/test_requirements.py",), ("requirements/*",), "reads"),
        Link(
            ("tests/box_support/box.py",),
            ("images/*", ".dockerignore", "operator/*", "trainer_image/*", "manifests/operator/*"),
            "runs the images, which hold",
        ),
        Link(
            (f"{OPERATOR}/rendering/templates.py",),
            (f"{OPERATOR}/rendering/templates/*", f"{OPERATOR}/launchers/templates/*"),
            "fills in",
        ),
        Link((f"{OPERATOR}/cli/ui/pages.py",), (f"{OPERATOR}/cli/ui/templates/*",), "fills in"),
        Link((f"{OPERATOR}/cli/ui/ui_server.py",), (f"{OPERATOR}/cli/ui/static/*",), "sends"),
        Link((f"{CONTRACT}/plans.py",), (f"{CONTRACT}/tensor_families.json",), "reads"),
        Link((f"{CONTRACT}/arguments.py",), (f"{CONTRACT}/training_arguments.json",), "reads"),
        Link((f"{TRAINER}/model_card.py",), (f"{TRAINER}/templates/*",), "fills in"),
        Link(("tests/e2e/local/test_readme.py", "tests/first_run.py"), ("manifests/examples/*",), "runs"),
        Link(("tests/e2e/local/test_readme.py",), ("docs/*",), "lists"),
        Link(("tests/unit/test_docs_guides.py",), ("docs/*", "CONTRIBUTING.md"), "compares with the code"),
        Link(("tests/cluster/test_readme_cluster.py",), ("manifests/*",), "applies"),
    ),
    everything=(
        Row(("constraints.txt", "requirements/dev.txt"), "versions of the libraries"),
        Row(("pyproject.toml", "*/pyproject.toml"), "packages, and settings of pytest"),
    ),
    nothing=(
        Row(("LICENSE", "CHANGELOG.md"), "for readers"),
        Row((".gitignore", ".pre-commit-config.yaml"), "settings of git"),
        Row((".proselintrc.json",), "settings of lint"),
        Row(("tests/benchmarks/*",), "started by hand"),
        Row((".ci/*", "tests/box_support/phases.py"), "starts the suites"),
        Row(("*/py.typed",), "for type checkers"),
    ),
    always=(
        Row(("tests/architecture/test_layers.py",), "reads every file"),
        Row(("tests/architecture/test_links.py",), "follows links to any file"),
    ),
)
