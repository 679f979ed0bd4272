"""A real API server for the tests of this folder, or a reason for its absence; and the programs around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from cluster_support.api_access import Api, Object
from cluster_support.control_plane import Cluster, running_cluster
from cluster_support.jobs_with_status import Jobs
from cluster_support.operator_process import OperatorProcess, install
from cluster_support.stand_ins import StandIns, running_stand_ins
from cluster_support.world import SETTINGS, World, fresh_namespace, install_kinds, namespace_for_pods


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that draws pictures again."""
    parser.addoption("--record-ui", action="store_true", help="write docs/ui*.png from what the pages show")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster of FINETUNE_TEST_KUBECONFIG, or a control plane started from programs in KUBEBUILDER_ASSETS."""
    with running_cluster(tmp_path_factory.mktemp("control-plane")) as found:
        yield found


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane for one module, whose tests add and remove shared things: kinds, rights, webhooks."""
    with running_cluster(tmp_path_factory.mktemp("own-control-plane")) as found:
        found.own("giving and taking kinds and rights")
        yield found


@pytest.fixture(scope="session")
def stand_ins(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIns]:
    """Nodes and training operators; skipped where no controllers run."""
    with running_stand_ins(cluster, tmp_path_factory.mktemp("kubelet")) as around:
        yield around


@pytest.fixture(scope="module")
def kinds(cluster: Cluster) -> None:
    """Install the kinds of jobs' objects; once a module, as another module may have removed them."""
    install_kinds(cluster)


@pytest.fixture(scope="module")
def operator_settings() -> Object:
    """Settings of the module's operator; a module may have its own."""
    return SETTINGS


@pytest.fixture(scope="module")
def operator_process(
    cluster: Cluster,
    kinds: None,
    stand_ins: StandIns,
    operator_settings: Object,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[OperatorProcess]:
    """One operator for all tests of a module, under the rights of the manifests."""
    install(cluster)
    process = OperatorProcess(cluster, tmp_path_factory.mktemp("operator"), operator_settings)
    process.start()
    try:
        yield process
    finally:
        process.terminate()


@pytest.fixture
def operator(operator_process: OperatorProcess) -> OperatorProcess:
    """Return the module's operator, running, also after a test that stopped it."""
    if not operator_process.running:
        operator_process.start()
    return operator_process


@pytest.fixture(scope="module")
def new_world(
    cluster: Cluster, stand_ins: StandIns, operator_process: OperatorProcess
) -> Callable[[], AbstractContextManager[World]]:
    """Return a function that makes a world: a new namespace in which PodSecurity enforces `restricted`."""

    @contextmanager
    def make() -> Iterator[World]:
        with namespace_for_pods(cluster) as name:
            yield World(
                namespace=name,
                cluster=cluster,
                api=Api(cluster.access),
                kubelet=stand_ins.kubelet,
                gangs=stand_ins.gangs,
                operator=operator_process,
                background=stand_ins.background,
                watching=stand_ins.watching,
            )

    return make


@pytest.fixture
def world(
    operator: OperatorProcess, new_world: Callable[[], AbstractContextManager[World]], stand_ins: StandIns
) -> Iterator[World]:
    """A world of the test's own, with a running operator."""
    with new_world() as made:
        yield made
        complaints, stand_ins.kubelet.complaints[:] = list(stand_ins.kubelet.complaints), []
        stand_ins.kubelet.playbook.clear()
        stand_ins.background.check()
        assert complaints == []
        assert operator.running, operator.logs()[-4000:]


@pytest.fixture
def jobs(cluster: Cluster, kinds: None, tmp_path: Path) -> Iterator[Jobs]:
    """Jobs with made-up statuses, in a namespace where no operator works."""
    with fresh_namespace(cluster) as namespace:
        yield Jobs(cluster, namespace, tmp_path)
