"""The launcher of the training, as training operators are installed in a cluster and removed."""

from __future__ import annotations

import pytest

from box_support.box import Box
from box_support.team import Team, tiny_spec
from cluster_support.api_access import Object

HELD = {"suspend": True}
"""Run policy of jobs that are only planned: the launcher shows without pods."""


def planned(launcher: str):  # type: ignore[no-untyped-def]
    def look(status: Object) -> bool:
        return status.get("plan", {}).get("launcher") == launcher

    return look


def refusal(status: Object) -> str | None:
    conditions = {one["type"]: one for one in status.get("conditions", [])}
    found = conditions.get("Planned")
    return found["message"] if found is not None and found["status"] == "False" else None


@pytest.mark.bare
def test_auto_follows_the_served_launchers_and_refusal_names_the_missing(box: Box, team: Team) -> None:
    """The jobs are suspended: their plan is made again whenever other launchers are served."""
    box.own("a cluster without training operators")
    assert not box.controllers, "another test has installed training operators before"
    auto, wants_mpi = team.new_name("auto"), team.new_name("wants-mpi")
    team.apply(auto, tiny_spec(launcher="auto", runPolicy=HELD))
    team.apply(wants_mpi, tiny_spec(launcher="mpijob", runPolicy=HELD))

    team.wait(auto, planned("job"), "planned for the Indexed Job")
    refused = team.wait(wants_mpi, refusal, "the refusal of a launcher that is not served")
    assert "spec.launcher" in refused
    assert "install the MPI Operator, which serves MPIJob (kubeflow.org/v2beta1)" in refused

    box.install_controller("mpi-operator")
    team.wait(auto, planned("mpijob"), "planned for MPIJob after its operator came")
    team.wait(wants_mpi, planned("mpijob"), "the asked-for launcher is served now")

    box.install_controller("training-operator")
    team.wait(auto, planned("pytorchjob"), "planned for PyTorchJob after its operator came")

    box.kubectl("delete", "crd", "pytorchjobs.kubeflow.org", seconds=60)
    team.wait(auto, planned("mpijob"), "planned for MPIJob after PyTorchJob has gone")
    box.controllers.discard("training-operator")

    for name in (auto, wants_mpi):
        assert team.pods(name) == []
        team.delete(name)
