"""Write the records of an image: an SBOM (CycloneDX 1.6) of its packages, and an in-toto statement of how it was built.

images/build calls it. Equal input gives equal bytes: the SBOM's serial number is derived from its content, and its time
is given. The statement (SLSA provenance v1) is not signed, and it is as true as the machine that wrote it;
docs/release.md describes how to sign it. It never holds a credential: options of the engine are recorded without their
values, addresses without a user.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, License
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

ROOT = Path(__file__).resolve().parents[1]
BUILD_TYPE = "https://finetune.dev/images-build/v1"
"""Meaning of the parameters below: those of images/build, whose first lines describe them."""
LOCAL_BUILDER = "https://finetune.dev/builders/local"
"""A machine of whoever ran images/build; anybody could have written its statement."""


# ---------------------------------------------------------------------------------------------------------------- SBOM


def sbom(inventory: Mapping[str, object], name: str, version: str, created: int) -> str:
    """Return the SBOM of an image as JSON.

    `inventory` is the output of release/inventory.py, `created` the seconds since 1970 that the SBOM is dated with.
    """
    image = Component(name=name, version=version, type=ComponentType.CONTAINER, bom_ref=f"image:{name}@{version}")
    bom = Bom()
    digest = hashlib.sha256(json.dumps([name, version, inventory], sort_keys=True).encode()).hexdigest()
    bom.serial_number = uuid5(NAMESPACE_URL, f"https://finetune.dev/sbom/{digest}")
    bom.metadata.timestamp = datetime.fromtimestamp(created, UTC)
    bom.metadata.component = image
    packages = _python_components(_rows(inventory, "python"))
    system = _debian_components(_rows(inventory, "debian"), str(_mapping(inventory["os"]).get("codename", "")))
    components = [*(component for component, _ in packages.values()), *system]
    for component in components:
        bom.components.add(component)
    bom.register_dependency(image, components)
    for component, requires in packages.values():
        bom.register_dependency(component, [packages[each][0] for each in requires if each in packages])
    return make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1) + "\n"


def _python_components(rows: Sequence[Mapping[str, object]]) -> dict[str, tuple[Component, list[str]]]:
    """Return by normalized name each distribution with the normalized names of its requirements."""
    found = {}
    for row in rows:
        name, version = _normalized(str(row["name"])), str(row["version"])
        purl = PackageURL("pypi", None, name, version)
        component = Component(
            name=str(row["name"]),
            version=version,
            type=ComponentType.LIBRARY,
            purl=purl,
            bom_ref=str(purl),
            licenses=_licenses(_strings(row["licenses"])),
        )
        found[name] = (component, [_normalized(each) for each in _strings(row["requires"])])
    return found


def _debian_components(rows: Sequence[Mapping[str, object]], codename: str) -> list[Component]:
    found = []
    for row in rows:
        qualifiers = {"arch": str(row["architecture"]), "distro": codename}
        if row["source"] != row["name"]:
            qualifiers["upstream"] = str(row["source"])
        purl = PackageURL("deb", "debian", str(row["name"]), str(row["version"]), qualifiers)
        found.append(
            Component(
                name=str(row["name"]),
                version=str(row["version"]),
                type=ComponentType.LIBRARY,
                purl=purl,
                bom_ref=str(purl),
            )
        )
    return found


def _licenses(declared: Sequence[str]) -> list[License]:
    """Return the licenses of a distribution, declared as one SPDX expression or as classifiers of the index."""
    if len(declared) == 1 and not declared[0].startswith("License :: "):
        return [LicenseFactory().make_from_string(declared[0])]
    return [DisjunctiveLicense(name=each.rpartition(" :: ")[2]) for each in declared]


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _rows(inventory: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    rows = inventory[key]
    if not isinstance(rows, list):
        raise TypeError(f"{key} of the inventory is no list")
    return [_mapping(row) for row in rows]


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} of the inventory is no object")
    return value


def _strings(value: object) -> list[str]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} of the inventory is no list")
    return [str(item) for item in value]


# ---------------------------------------------------------------------------------------------------------- provenance


def provenance(
    *,
    image: str,
    subjects: Sequence[tuple[str, str]],
    arguments: Mapping[str, str],
    options: Sequence[str],
    base: str,
    base_digest: str,
    by_digest: bool,
    revision: str,
    engine: str,
    builder: str,
    epoch: str,
    root: Path = ROOT,
) -> dict[str, object]:
    """Return the statement of how an image was built.

    `subjects` are names with their SHA-256. `by_digest`: whether the build asked for the base by `base_digest`; if not,
    that is the digest of the image that the tag led to, empty if the engine does not know one.
    """
    dockerfile = f"images/{image.removeprefix('finetune-')}/Dockerfile"
    material: dict[str, object] = {"uri": f"pkg:docker/{base.partition('@')[0].replace(':', '@')}"}
    if base_digest:
        material["digest"] = {"sha256": base_digest.removeprefix("sha256:")}
    material["annotations"] = {"requestedByDigest": by_digest}
    commit, _, dirty = revision.partition("-")
    source: dict[str, object] = {"name": "source", "digest": {"gitCommit": commit}}
    source["annotations"] = {"uncommittedChanges": bool(dirty)}
    files = [dockerfile, "images/bases.lock", "constraints.txt", *_copied_files((root / dockerfile).read_text("utf-8"))]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in subjects],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "image": image,
                    "arguments": {name: _without_user(value) for name, value in sorted(arguments.items())},
                    "engineOptions": [option for option in map(_without_value, options) if option],
                },
                "internalParameters": {"SOURCE_DATE_EPOCH": epoch},
                "resolvedDependencies": [
                    *([source] if commit else []),
                    material,
                    *({"name": file, "digest": {"sha256": _sha256(root / file)}} for file in dict.fromkeys(files)),
                ],
            },
            "runDetails": {"builder": {"id": builder, "version": {"engine": engine}}},
        },
    }


def _copied_files(dockerfile: str) -> list[str]:
    """Return the single files that a Dockerfile copies into the build: requirements, patches, programs."""
    copies = re.findall(r"(?m)^COPY (?!--from)(.*) \S+$", dockerfile)
    return sorted({path for sources in copies for path in sources.split() if Path(path).suffix})


def _without_user(value: str) -> str:
    """Return an address without the user and password before its host."""
    return re.sub(r"(?<=://)[^/@]*@", "", value)


def _without_value(option: str) -> str:
    """Return the name of an option of the engine; empty for a word that is another option's value."""
    return option.partition("=")[0] if option.startswith("-") else ""


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ----------------------------------------------------------------------------------------------------------- arguments


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def main() -> None:
    """Print an SBOM or a statement."""
    parser = argparse.ArgumentParser(description="Prints a record of an image.")
    commands = parser.add_subparsers(dest="command", required=True)
    bill = commands.add_parser("sbom", help="of the inventory on standard input")
    bill.add_argument("--name", required=True)
    bill.add_argument("--version", required=True)
    bill.add_argument("--created", type=int, required=True, help="seconds since 1970")
    statement = commands.add_parser("provenance")
    statement.add_argument("--image", required=True, help="finetune-operator or finetune-trainer")
    statement.add_argument("--subject", type=_pair, action="append", required=True, help="NAME=SHA256")
    statement.add_argument("--argument", type=_pair, action="append", default=[], help="build argument, NAME=VALUE")
    statement.add_argument("--option", action="append", default=[], help="option of the engine, recorded by name")
    statement.add_argument("--base", required=True)
    statement.add_argument("--base-digest", default="")
    statement.add_argument("--by-digest", action="store_true")
    statement.add_argument("--revision", default="")
    statement.add_argument("--engine", required=True)
    statement.add_argument("--builder", default=LOCAL_BUILDER)
    statement.add_argument("--epoch", default="")
    given = parser.parse_args()
    if given.command == "sbom":
        print(sbom(json.load(sys.stdin), given.name, given.version, given.created), end="")
        return
    written = provenance(
        image=given.image,
        subjects=given.subject,
        arguments=dict(given.argument),
        options=given.option,
        base=given.base,
        base_digest=given.base_digest,
        by_digest=given.by_digest,
        revision=given.revision,
        engine=given.engine,
        builder=given.builder,
        epoch=given.epoch,
    )
    print(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
