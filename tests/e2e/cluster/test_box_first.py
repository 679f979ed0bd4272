from __future__ import annotations
from box_support.team import Team, tiny_spec


def test_first(team: Team) -> None:
    name = team.new_name("first")
    team.apply(name, tiny_spec(evaluation={}, predict={"columns": ["text"]}))
    print(team.succeeds(name))
