"""The store: the newer version wins, and a deleted object stays deleted."""

from collections.abc import Callable
from typing import Any

import pytest

from finetune_operator.controller.store.queue import JobKey
from finetune_operator.controller.store.store import TOMBSTONE_SECONDS, Store, UnreadableError, key_of
from finetune_operator.jobs.state.decision_types import ChildView, PodView
from finetune_operator.spec.kubernetes_objects import GroupKind
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from finetune_operator.spec.types import API_VERSION, KIND

KEY = JobKey("team", "demo")
FINETUNE_JOB = GroupKind.of(API_VERSION, KIND)
JOB = GroupKind("batch", "Job")
POD = GroupKind("", "Pod")
CREATED = "2026-01-01T00:00:00Z"


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Store:
    return Store(CLUSTER_SETTINGS, clock)


def metadata(name: str, uid: str, version: int, **labels: str) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": "team",
        "uid": uid,
        "resourceVersion": str(version),
        "generation": 1,
        "creationTimestamp": CREATED,
        "labels": {f"finetune.dev/{label.replace('_', '-')}": value for label, value in labels.items()},
    }


def job(version: int, uid: str = "job-1", phase: str = "Pending") -> dict[str, Any]:
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": metadata("demo", uid, version),
        "spec": {"task": "text-classification", "model": {"uri": "hf://a/b"}},
        "status": {"phase": phase},
    }


def controlled(metadata: dict[str, Any], kind: str, name: str, uid: str) -> dict[str, Any]:
    """Return `metadata` with that controller."""
    api_version = {"FineTuneJob": API_VERSION, "Job": "batch/v1"}[kind]
    reference = {"apiVersion": api_version, "kind": kind, "name": name, "uid": uid, "controller": True}
    return metadata | {"ownerReferences": [reference]}


def child(version: int, uid: str = "child-1", attempt: str = "1", job_uid: str = "job-1") -> dict[str, Any]:
    labels = {"job": "demo", "job_uid": job_uid, "stage": "train", "attempt": attempt}
    about = metadata(f"demo-train-{attempt}", uid, version, **labels)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": controlled(about, "FineTuneJob", "demo", job_uid),
        "spec": {},
        "status": {},
    }


def pod(version: int, name: str = "demo-train-1-0", uid: str = "pod-1", owner: str = "child-1") -> dict[str, Any]:
    labels = {"job": "demo", "job_uid": "job-1", "stage": "train", "attempt": "1"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": controlled(metadata(name, uid, version, **labels), "Job", "demo-train-1", owner),
        "spec": {"containers": []},
        "status": {"phase": "Running"},
    }


def replace_all(
    store: Store, kind: GroupKind, raws: list[dict[str, Any]], version: int, namespaces: set[str] | None = None
) -> set[JobKey]:
    """Take over a list of the kind, as `sync.read_all` does, and return the jobs with changes."""
    touched = {entry.job for raw in raws if (entry := store.put(raw)) is not None}
    return touched | store.retain_listed(kind, {key_of(raw) for raw in raws}, version, namespaces)


def children(store: Store) -> list[tuple[str, str | None]]:
    return [(view.ref.name, view.ref.uid) for view in store.children(("team", "job-1"))]


def phase(store: Store) -> str | None:
    view = store.job(KEY)
    return None if view is None else view.status.phase


def test_kinds_of_one_name_in_two_groups_are_kept_apart(store: Store):
    ours, other = child(2), child(3, uid="other") | {"apiVersion": "batch.volcano.sh/v1alpha1"}
    for raw in (job(1), ours, other):
        assert store.put(raw) is not None
    assert children(store) == [("demo-train-1", "child-1")]
    assert replace_all(store, GroupKind("batch.volcano.sh", "Job"), [], version=9) == {KEY}
    assert children(store) == [("demo-train-1", "child-1")]


def test_stored_objects_are_found_by_job_and_name(store: Store):
    for raw in (job(1), child(2), pod(3)):
        store.put(raw)

    found = store.job(KEY)
    assert found is not None
    assert (found.name, found.uid, store.job_version(KEY)) == ("demo", "job-1", "1")
    assert [type(view) for view in (*store.children(("team", "job-1")), *store.pods(("team", "job-1")))] == [
        ChildView,
        PodView,
    ]
    entry = store.get(POD, "team", "demo-train-1-0")
    assert entry is not None
    assert (entry.job, entry.job_uid, entry.uid) == (KEY, "job-1", "pod-1")


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        pytest.param([(5, "Training"), (4, "Pending")], "Training", id="an older word comes late"),
        pytest.param([(5, "Training"), (5, "Pending")], "Training", id="the same version is told again"),
        pytest.param([(9, "Pending"), (10, "Training")], "Training", id="versions are numbers, not text"),
    ],
)
def test_the_newer_version_wins(store: Store, versions: list[tuple[int, str]], expected: str):
    for version, written in versions:
        store.put(job(version, phase=written))

    assert phase(store) == expected


def test_only_newer_versions_are_stored(store: Store):
    assert store.put(child(5)) is not None
    assert store.put(child(5)) is None
    assert store.put(child(4)) is None
    assert store.put(child(6)) is not None


def test_late_answer_does_not_restore_a_deleted_object(store: Store):
    store.put(child(5))
    store.remove(child(8))

    assert store.put(child(7)) is None
    assert children(store) == []


def test_deletion_reported_before_the_create_response_counts(store: Store):
    store.remove(child(8))

    assert store.put(child(5)) is None
    assert children(store) == []


def test_an_object_that_comes_back_under_our_label_is_seen_again(store: Store):
    """A watch by label reports a removed label as a deletion."""
    store.put(child(5))
    store.remove(child(8))

    assert store.put(child(9)) is not None
    assert children(store) == [("demo-train-1", "child-1")]


def test_deletion_of_an_earlier_object_keeps_a_later_namesake(store: Store):
    store.put(child(5, uid="old"))
    store.put(child(9, uid="new"))
    store.remove(child(8, uid="old"))

    assert children(store) == [("demo-train-1", "new")]


def test_object_that_is_not_found_stays_deleted(store: Store):
    store.put(child(5))
    store.mark_deleted(JOB, "team", "demo-train-1")

    assert store.put(child(6)) is None
    assert children(store) == []


def test_that_another_object_is_gone_changes_nothing(store: Store):
    store.put(child(5, uid="new"))
    store.mark_deleted(JOB, "team", "demo-train-1", uid="old")

    assert children(store) == [("demo-train-1", "new")]


def test_deleted_objects_are_forgotten_after_a_while(store: Store, clock: Clock):
    store.remove(child(8))
    clock.now += TOMBSTONE_SECONDS + 1
    store.remove(child(9, uid="child-2", attempt="2"))

    assert store.put(child(7)) is not None


def test_list_removes_missing_objects_and_returns_their_jobs(store: Store):
    for raw in (child(5), child(6, uid="child-2", attempt="2"), pod(7)):
        store.put(raw)

    assert replace_all(store, JOB, [child(5)], version=20) == {KEY}
    assert children(store) == [("demo-train-1", "child-1")]
    assert len(store.pods(("team", "job-1"))) == 1


def test_list_keeps_objects_newer_than_itself(store: Store):
    store.put(child(30))

    assert replace_all(store, JOB, [], version=20) == set()
    assert children(store) == [("demo-train-1", "child-1")]


def test_a_list_of_one_namespace_leaves_the_others(store: Store):
    store.put(child(5))

    assert replace_all(store, JOB, [], version=20, namespaces={"elsewhere"}) == set()
    assert children(store) == [("demo-train-1", "child-1")]


def test_a_list_does_not_go_back_to_an_older_state(store: Store):
    store.put(job(25, phase="Training"))

    assert replace_all(store, FINETUNE_JOB, [job(10)], version=20) == set()
    assert phase(store) == "Training"


def test_a_list_of_one_job_removes_its_missing_pods_only(store: Store):
    store.put(pod(5))
    store.put(pod(6, name="demo-train-1-1", uid="pod-2"))
    store.put(child(7))
    store.replace_of_job(POD, ("team", "job-1"), [pod(5)], version=20)

    assert [view.name for view in store.pods(("team", "job-1")) if not view.deleted] == ["demo-train-1-0"]
    assert len(children(store)) == 1


def test_children_of_a_deleted_job_are_not_those_of_its_namesake(store: Store):
    store.put(child(5, job_uid="old"))
    store.put(job(9, uid="job-1"))

    assert children(store) == []


def test_a_changed_owner_label_moves_the_object(store: Store):
    store.put(child(5, job_uid="old"))
    store.put(child(6, job_uid="job-1"))

    assert store.children(("team", "old")) == ()
    assert children(store) == [("demo-train-1", "child-1")]


@pytest.mark.parametrize("make", [child, pod])
def test_object_of_another_namespace_is_foreign_for_any_labels(store: Store, make: Callable[..., dict[str, Any]]):
    store.put(job(1))
    store.put(child(2))
    foreign = make(3, uid="foreign")
    foreign["metadata"]["namespace"] = "evil"
    entry = store.put(foreign)

    assert entry is not None
    assert entry.job == JobKey("evil", "demo")
    assert children(store) == [("demo-train-1", "child-1")]
    assert store.pods(("team", "job-1")) == ()
    # Nor when it is deleted, or missing from a list of its namespace.
    store.remove({**foreign, "metadata": {**foreign["metadata"], "resourceVersion": "4"}})
    replace_all(store, foreign["kind"], [], 5, {"evil"})
    assert children(store) == [("demo-train-1", "child-1")]
    assert store.pods(("team", "job-1")) == ()


def test_only_news_breaks_the_silence(store: Store, clock: Clock):
    store.put(child(5))
    clock.now += 100
    store.put(child(5))
    assert store.last_change_at(("team", "job-1")) == 1000.0

    store.put(pod(6))
    assert store.last_change_at(("team", "job-1")) == 1100.0
    assert store.last_change_at(("team", "nobody")) == 0.0


@pytest.mark.parametrize("version", ["", "abc", "1.5", "-3"])
def test_a_version_that_cannot_be_compared_is_refused(store: Store, version: str):
    raw = child(5)
    raw["metadata"]["resourceVersion"] = version

    with pytest.raises(UnreadableError, match="is not a whole number"):
        store.put(raw)


def test_pods_of_an_earlier_job_of_the_name_are_listed_until_deleted(store: Store):
    store.put(job(10, uid="job-2"))
    store.put(pod(11))
    assert [found.name for found in store.pods_before(KEY, "job-2")] == ["demo-train-1-0"]
    assert store.pods_before(KEY, "job-1") == ()
    store.remove(pod(12))
    assert store.pods_before(KEY, "job-2") == ()


def last_state(version: int, phase: str) -> dict[str, Any]:
    """Return a pod as a watch reports it with its deletion."""
    raw = pod(version)
    raw["status"]["phase"] = phase
    return raw


def seen_of(store: Store) -> list[tuple[str, bool]]:
    return [(view.phase, view.deleted) for view in store.pods(("team", "job-1"))]


def test_last_state_of_a_deleted_pod_is_retained_during_its_attempt(store: Store):
    store.put(child(2))
    store.put(pod(3))
    store.remove(last_state(4, "Failed"))
    assert seen_of(store) == [("Failed", True)]
    store.put(child(5, uid="child-2", attempt="2"))
    store.remove(child(6, uid="child-2", attempt="2"))
    assert seen_of(store) == [("Failed", True)]
    store.remove(child(7))
    assert seen_of(store) == []


def test_pod_missing_in_a_list_keeps_its_last_state(store: Store):
    store.put(child(2))
    store.put(pod(3))
    replace_all(store, POD, [], version=9)
    assert seen_of(store) == [("Running", True)]


@pytest.mark.parametrize(
    ("before", "phase"),
    [([pod(3)], "Failed"), ([child(2, attempt="2"), pod(3)], "Failed"), ([child(2), pod(3)], "Pending")],
    ids=["of no attempt", "of another attempt", "that never ran"],
)
def test_pod_without_influence_is_not_kept(store: Store, before: list[dict[str, Any]], phase: str):
    for raw in before:
        store.put(raw)
    store.remove(last_state(4, phase))
    assert seen_of(store) == []
