"""List what is installed in the image that this program runs in, as JSON: Debian's packages and Python's distributions.

images/build starts it in an image it has built, and release/records.py makes the SBOM of its output. It needs nothing
but the standard library, as an image holds no tools.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

APART = Path("/opt/finetune/fp8")
"""Folder of distributions that only some jobs import; not in sys.path."""
DPKG_STATUS = Path("/var/lib/dpkg/status")
OS_RELEASE = Path("/etc/os-release")


def python_package(found: Distribution) -> dict[str, object]:
    """Return name, version, licenses and requirements of a distribution; requirements of extras are left out."""
    classifiers = found.metadata.get_all("Classifier") or []
    expression = found.metadata.json.get("license_expression")
    licenses = [expression] if expression else [line for line in classifiers if line.startswith("License :: ")]
    requirements = [line for line in found.requires or [] if not re.search(r"\bextra\s*==", line)]
    return {
        "name": found.metadata["Name"],
        "version": found.version,
        "licenses": sorted(map(str, licenses)),
        "requires": sorted({re.split(r"[^-\w.]", line, maxsplit=1)[0] for line in requirements}),
    }


def debian_packages(status: str) -> list[dict[str, str]]:
    """Return name, version, architecture and source of each package that dpkg's status file calls installed."""
    found = []
    for paragraph in status.split("\n\n"):
        fields: dict[str, str] = dict(re.findall(r"(?m)^([\w-]+): (.*)$", paragraph))
        if fields.get("Status", "").endswith(" installed"):
            name = fields["Package"]
            source = fields.get("Source", name).split()[0]
            found.append(
                {"name": name, "version": fields["Version"], "architecture": fields["Architecture"], "source": source}
            )
    return sorted(found, key=lambda package: (package["name"], package["architecture"]))


def main() -> None:
    """Print the inventory."""
    release = dict(re.findall(r'(?m)^(\w+)="?([^"\n]*)"?$', OS_RELEASE.read_text(encoding="utf-8")))
    installed = {
        (str(found.metadata["Name"]).lower(), found.version): python_package(found)
        for found in distributions(path=[*sys.path, str(APART)])
    }
    json.dump(
        {
            "os": {"id": release.get("ID", ""), "codename": release.get("VERSION_CODENAME", "")},
            "debian": debian_packages(DPKG_STATUS.read_text(encoding="utf-8")),
            "python": [installed[key] for key in sorted(installed)],
        },
        sys.stdout,
        indent=1,
    )


if __name__ == "__main__":
    main()
