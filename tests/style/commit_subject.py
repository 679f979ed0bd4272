"""Hook of git: refuse a commit whose subject is no short imperative sentence. `pre-commit install` sets it up.

    python tests/style/commit_subject.py FILE

FILE holds the message, as git passes it to the hook commit-msg. Exits with 1 for a subject that breaks a rule and names
the rule.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LONGEST_SUBJECT = 72
"""Characters that `git log --oneline` shows in a terminal of 80 columns."""
WRITTEN_BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")
ENDINGS = re.compile(r"(?:[^es]ed|ing|[^s]s)$")
"""Endings of verbs that are not imperative: Added, Adding, Adds. "Need" and "Pass" are."""
IMPERATIVE = frozenset({"Bring", "Embed", "Focus", "Shed", "String", "Canvas", "Ring", "Swing", "Alias", "Bias"})
"""Verbs that end so and are imperative."""


def problems_of(message: str) -> list[str]:
    """Return a sentence for each rule that the message of a commit breaks; an empty list for a good one."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject, rest = (lines[0], lines[1:]) if lines else ("", [])
    if subject.startswith(WRITTEN_BY_GIT):
        return []
    first = subject.split(" ")[0]
    found = []
    if not first:
        found.append("The first line is empty: write a subject there.")
    if len(subject) > LONGEST_SUBJECT:
        found.append(
            f"The subject has {len(subject)} characters, at most {LONGEST_SUBJECT} are allowed: "
            "move reasons to the body."
        )
    if first and not first[0].isupper():
        found.append(f"The subject begins with {first!r}: begin with a capital letter.")
    if ENDINGS.search(first) and first not in IMPERATIVE:
        found.append(f"The subject begins with {first!r}: begin with a verb in the imperative, such as Add or Fix.")
    if subject.endswith("."):
        found.append("The subject ends with a full stop: remove it.")
    if rest and rest[0].strip():
        found.append("The second line is not empty: leave a blank line between subject and body.")
    return found


if __name__ == "__main__":
    found = problems_of(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for problem in found:
        print(problem, file=sys.stderr)
    sys.exit(bool(found))
