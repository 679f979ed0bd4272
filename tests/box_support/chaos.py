"""A storm over jobs in a box: each job is applied, hit according to its schedule, and followed to its end.

The evidence for the checks does not come from the operator alone: attempts and their times from this machine's
processes, created objects from the API server's audit log, training steps from the files on the claim.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

import psutil
import requests

from box_support import faults
from box_support.box import Box
from box_support.chaos_schedule import (
    BLIND,
    CONTROL,
    GRACEFUL,
    RANKS,
    STAGES,
    TRAIN,
    Case,
    Doom,
    Fate,
    Fault,
    Kind,
    Moment,
    Schedule,
    Strike,
)
from box_support.team import INPUTS, TERMINAL, Team, last_step, stage_of, tiny_spec
from cluster_support.api_access import Api, ApiError, Object, path_of
from cluster_support.operator_process import NAMESPACE
from finetune_contract.layout import JobPaths
from finetune_operator.jobs.render.pod_parts import CONTAINER_NAME
from finetune_operator.spec.types import API_VERSION, KIND, PLURAL
from suite_plugins.patience import patient

T = TypeVar("T")
log = logging.getLogger(__name__)
"""Beside `Storm.log`, to watch a run (`--log-cli-level=INFO`)."""

AT_A_TIME = 3
"""Jobs in parallel. Most of a job's time its pods import torch, which takes a core each."""
STEPS = 40
"""Steps of each training."""
STEP_SECONDS = 0.25
"""Sleep in each step: long enough for a fault in the middle."""
STEPS_BETWEEN_CHECKPOINTS = 4
CLASSIFIER = "classifier"
"""Folder of the inputs with a model that has a head, for jobs without training."""
PROGRESS_SECONDS = math.ceil(patient(20))
"""Time without a new step after which a training counts as hung, in jobs with a scheduled hang."""
STILL_SECONDS = 420
"""Time without a change after which a job is lost. The longest legitimate one is that of a hung process: the deadline
and the grace period after it.
"""
_LOOK_SECONDS = 0.05
_REQUEST_SECONDS = 0.3
"""Time between two requests to the API server about one job."""
_STARTING_SECONDS = 3.0
"""Time in which a pod's program still imports; a kill within it breaks the attempt."""
_LOGGED_REASONS = ("StageStarted", "StageFailed", "Restarting", "Suspended", "Resumed", "StageSucceeded")
"""Reasons of events to include in the log of a storm."""
_LATE_SHARE = 0.8
"""Share of the steps; a training requested to stop after it may finish first."""
_PASSES = (401, 403, 404, 429, 500, 502, 503, 504)
"""Temporary status codes of an API server that has just started."""


def spec_of(fate: Fate) -> Object:
    """Return the job as a user would write it."""
    case, hangs = fate.case, any(fault.kind is Kind.HANG for fault in fate.faults)
    training = {"maxSteps": STEPS, "globalBatchSize": 16, "learningRate": 0.002, "precision": "fp32"}
    match case.doom:
        case Doom.DIVERGES:
            # Each step multiplies the weights by -99: after a few the loss is too large for fp32.
            training |= {"learningRate": 10, "weightDecay": 10, "scheduler": "constant"}
        case Doom.GATE:
            training |= {"learningRate": 1e-9}
    spec = tiny_spec(
        launcher=case.launcher,
        resources={"nodes": case.nodes, "processesPerNode": 1, "cpu": "1", "memory": "2Gi"},
        parallelism={"strategy": "ddp" if case.nodes > 1 else "single"},
        runPolicy={
            "maxRestarts": case.max_restarts,
            **({"progressDeadlineSeconds": PROGRESS_SECONDS} if hangs else {}),
        },
    )
    del spec["training"]
    if TRAIN in case.stages:
        spec |= {"training": training, "checkpoints": {"every": {"steps": STEPS_BETWEEN_CHECKPOINTS}}}
    if "evaluate" in case.stages:
        spec["evaluation"] = {"gate": {"metric": "accuracy", "minimum": 0.99}} if case.doom is Doom.GATE else {}
    if TRAIN not in case.stages:
        spec["model"] = {"uri": f"pvc://{INPUTS}/{CLASSIFIER}"}
    if "predict" in case.stages:
        spec["predict"] = {"dataset": {"uri": f"pvc://{INPUTS}/tiny/data"}, "columns": ["text"]}
    match case.doom:
        case Doom.COLUMN:
            spec["dataset"] = {**spec["dataset"], "columns": {"text": "txet"}}
        case Doom.SECRET:
            spec["secrets"] = {"hubToken": {"name": "missing-secret", "key": "token"}}
    return spec


# -------------------------------------------------------------------------------------------------- running containers


@dataclass(frozen=True)
class Live:
    """A container of a training job that runs on this machine."""

    pod: str
    job: str
    stage: str
    attempt: int
    began: float
    """Unix time."""
    process: int
    """Process id of its first process."""

    @property
    def works(self) -> bool:
        """True if a stage runs in it: the worker of an MPIJob, before mpirun and after its end, is an SSH server alone,
        which may still exist when the next stage begins.
        """
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.process)
            for process in (first, *first.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    command = process.cmdline()
                    if "finetune_trainer" in " ".join(command) and "sshd" not in command:
                        return True
        return False


_POD = re.compile(rf"^(?P<job>.+)-(?P<stage>{'|'.join(STAGES)})-(?P<attempt>\d+)(-.+)?$")


def living(box: Box, namespace: str) -> list[Live]:
    """Return containers with live processes, in any state of the API server; by name of the pod."""
    found = []
    for file in (box.own("looking into pods") / "kubelet" / "pods").glob(f"*/containers/{CONTAINER_NAME}/exec.json"):
        try:
            entry, began = json.loads(file.read_text()), file.stat().st_mtime
            alive = str(file.parent / "start").encode() in Path(f"/proc/{entry['pid']}/cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        place, pod = entry["pod"]
        if alive and place == namespace and (named := _POD.match(pod)):
            found.append(Live(pod, named["job"], named["stage"], int(named["attempt"]), began, entry["pid"]))
    return sorted(found, key=lambda one: one.pod)


class Watch:
    """Watches for two attempts of one job that run at once: both would write to one place."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seen: set[tuple[str, str, int]] = set()
        """Job, stage and attempt of everything that ever ran."""
        self.worked: set[tuple[str, str, int]] = set()
        """Job, stage and attempt of each container in which a stage was seen running."""
        self.overlaps: list[str] = []
        self.trouble: Exception | None = None

    @contextmanager
    def running(self) -> Iterator[Watch]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join()

    def _run(self) -> None:
        reported: set[frozenset[tuple[str, int]]] = set()
        try:
            while not self._stop.wait(0.1):
                attempts: dict[str, list[Live]] = {}
                for one in living(self._team.box, self._team.namespace):
                    attempt = (one.job, one.stage, one.attempt)
                    self.seen.add(attempt)
                    if attempt not in self.worked and one.works:
                        self.worked.add(attempt)
                    attempts.setdefault(one.job, []).append(one)
                for job, pods in attempts.items():
                    if len({(one.stage, one.attempt) for one in pods}) < 2:
                        continue
                    pods = [one for one in pods if one.works]
                    several = frozenset((one.stage, one.attempt) for one in pods)
                    if len(several) > 1 and several | {(job, 0)} not in reported:
                        reported.add(several | {(job, 0)})
                        self.overlaps.append(f"{clock()} {job}: {', '.join(one.pod for one in pods)}")
        except Exception as error:
            self.trouble = error


# ------------------------------------------------------------------------------------------------------------ the storm


def clock() -> str:
    return time.strftime("%H:%M:%S", time.gmtime())


class Missed(Exception):  # noqa: N818  # an answer and no error
    """The fault found no target; it is retried on a later attempt, or on another job."""


@dataclass(frozen=True)
class Aim:
    """Target of a fault."""

    stage: str
    attempt: int
    pods: tuple[Live, ...] = ()
    """Running pods of the attempt."""

    def pod(self, fault: Fault) -> str:
        if not self.pods:
            raise Missed("no pod runs")
        return self.pods[fault.pod % len(self.pods)].pod


@dataclass
class JobState:
    """State of one job during the storm."""

    case: Case
    name: str
    """Name as applied."""
    strikes: list[Strike] = field(default_factory=list)
    struck: dict[str, int] = field(default_factory=dict)
    """Stage -> its last attempt that was hit by a breaking fault."""
    made: list[Fault] = field(default_factory=list)
    status: Object = field(default_factory=dict)
    """Status at its end; empty: the job is lost."""
    mark: int = 0
    """Position in the audit log at its end."""
    folder: Path | None = None
    """Folder of its results."""
    news: tuple[Object, float] = field(default_factory=lambda: ({}, time.monotonic()))
    """Last changed status, and the time of the change."""

    @property
    def still(self) -> bool:
        """True if nothing has changed for too long."""
        return time.monotonic() - self.news[1] > patient(STILL_SECONDS)


@dataclass
class Storm:
    """Runs a schedule, and keeps the results for the tests."""

    team: Team
    schedule: Schedule
    states: dict[str, JobState] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    spare: list[Fault] = field(default_factory=list)
    """Faults whose job ended before their moment."""
    overlaps: list[str] = field(default_factory=list)
    seen: set[tuple[str, str, int]] = field(default_factory=set)
    worked: set[tuple[str, str, int]] = field(default_factory=set)
    _hand: threading.RLock = field(default_factory=threading.RLock)
    """Held during a fault that needs the API server, or takes it away."""
    _outage: threading.Lock = field(default_factory=threading.Lock)
    """Held while a node is down."""
    _spare: threading.Lock = field(default_factory=threading.Lock)
    _called_off: threading.Event = field(default_factory=threading.Event)
    """Set when the test failed or timed out: stop waiting."""

    def rage(self) -> None:
        """Run the schedule: jobs in order, some at a time; faults that could not be made go to one more job."""
        self.template = faults.puppet(self.team, STEP_SECONDS)
        self.mark = self.team.box.cluster.audit_mark()
        self.log_sizes = self._operator_logs()
        began = time.monotonic()
        with Watch(self.team).running() as watch:
            with ThreadPoolExecutor(AT_A_TIME) as pool:
                try:
                    for ended in [pool.submit(self._live, fate) for fate in self.schedule.fates]:
                        ended.result()
                except BaseException:
                    self._called_off.set()
                    raise
            for more in range(3):
                if left := self._take_spare():
                    # The new job has a claim, which is bound late until the controllers have found the API server.
                    faults.caught_up(self.team)
                    case = Case(f"storm-more-{more}", nodes=2, max_restarts=len(left))
                    self._live(Fate(case, tuple(replace(one, stage=TRAIN, together=False) for one in left)))
        self.overlaps, self.seen, self.worked = watch.overlaps, watch.seen, watch.worked
        self.record("-", f"all over after {time.monotonic() - began:.0f} s")
        if watch.trouble is not None:
            raise watch.trouble

    @property
    def done(self) -> tuple[Fault, ...]:
        """Faults that were injected."""
        return tuple(fault for job_state in self.states.values() for fault in job_state.made)

    def record(self, job: str, text: str) -> None:
        self.log.append(f"{clock()} {job}: {text}")
        log.info("%s: %s", job, text)

    def describe(self) -> str:
        """Return everything that explains a failure, and how to repeat it."""
        again = f"FINETUNE_FAULTS={len(self.schedule.faults)} FINETUNE_SEED={self.schedule.seed}"
        return "\n".join([f"again: {again}", str(self.schedule), "what happened:", *self.log])

    # ----------------------------------------------------------------------------------------------------- one job

    def _live(self, fate: Fate) -> None:
        team = Team(replace(self.team.box, api=Api(self.team.box.cluster.access)), self.team.namespace)
        job_state = JobState(fate.case, team.new_name(fate.case.name))
        self.states[fate.case.name] = job_state
        _apply(team, job_state.name, spec_of(fate) | {"template": self.template})
        self.record(job_state.name, "applied")
        for group in fate.groups:
            left = self._deal(team, job_state, group)
            if left:
                self.record(job_state.name, "not made: " + "; ".join(map(str, left)))
                with self._spare:
                    self.spare += left
        self._end(team, job_state)

    def _take_spare(self) -> list[Fault]:
        with self._spare:
            left, self.spare = self.spare, []
        return left

    def _end(self, team: Team, job_state: JobState) -> None:
        while not (job_state.still or self._called_off.is_set()):
            status = _look(team, job_state)
            if status.get("phase") in TERMINAL:
                job_state.status, job_state.mark = status, team.box.cluster.audit_mark()
                failure = status.get("failure") or {}
                why = f" ({failure.get('class')}: {str(failure.get('message'))[:160]})" if failure else ""
                self.record(job_state.name, f"{status['phase']} after {status.get('restarts', 0)} restarts{why}")
                for event in patiently(lambda: team.events(job_state.name)):
                    if event["reason"] in _LOGGED_REASONS:
                        self.log.append(f"    {event['firstTimestamp']} {event['message'][:300]}")
                return
            time.sleep(_REQUEST_SECONDS)
        self.record(job_state.name, "LOST\n" + patiently(lambda: team.describe(job_state.name)))

    # --------------------------------------------------------------------------------------------------- one fault

    def _deal(self, team: Team, job_state: JobState, group: Sequence[Fault]) -> list[Fault]:
        """Inject the faults of one moment; return those that came too late."""
        first, *others = group
        while (aim := self._await(team, job_state, first)) is not None:
            try:
                self._make(team, job_state, first, others, aim)
            except Missed as why:
                self.record(job_state.name, f"missed ({why}): {first}")
                time.sleep(_LOOK_SECONDS)
                continue
            return [one for one in others if one not in job_state.made]
        return list(group)

    def _await(self, team: Team, job_state: JobState, fault: Fault) -> Aim | None:
        """Wait for the fault's moment and return its target; None if the moment cannot come any more."""
        requested_at, status = 0.0, Object()
        while not (job_state.still or self._called_off.is_set()):
            if time.monotonic() - requested_at > _REQUEST_SECONDS:
                requested_at, status = time.monotonic(), _look(team, job_state)
            if status.get("phase") in TERMINAL or stage_of(status, fault.stage).get("state") == "Succeeded":
                return None
            if (aim := _aim(team, job_state, fault, status)) is not None:
                return aim
            time.sleep(_LOOK_SECONDS)
        return None

    def _make(self, team: Team, job_state: JobState, first: Fault, others: Sequence[Fault], aim: Aim) -> None:
        # A signal needs no API server, and a training does not wait for an absent one.
        with nullcontext() if first.kind in BLIND | RANKS else self._hand:
            if aim.pods and not set(aim.pods) <= set(living(team.box, team.namespace)):
                raise Missed("it is over meanwhile")
            match first.kind:
                case Kind.API:
                    with faults.api_server_away(team.box):
                        self._made(team, job_state, first, aim, "")
                        self._make_others(team, job_state, others, aim)
                        time.sleep(first.seconds)
                case Kind.OPERATOR | Kind.OPERATORS:
                    which: Literal["acting", "all"] = "acting" if first.kind is Kind.OPERATOR else "all"
                    self._made(team, job_state, first, aim, _kill_operator(team, which))
                    self._make_others(team, job_state, others, aim)
                case Kind.SUSPEND | Kind.NODE_OFF:
                    pass
                case _:
                    self._break(team, job_state, first, aim)
        # These take time, and other faults may happen meanwhile.
        if first.kind is Kind.SUSPEND:
            self._suspend(team, job_state, first, aim)
        elif first.kind is Kind.NODE_OFF:
            self._node_off(team, job_state, first, aim)

    def _make_others(self, team: Team, job_state: JobState, others: Sequence[Fault], aim: Aim) -> None:
        for other in others:
            with suppress(Missed):
                self._break(team, job_state, other, aim)

    def _break(self, team: Team, job_state: JobState, fault: Fault, aim: Aim) -> None:
        """Inject an instantaneous fault; `Missed` if it had no target."""
        try:
            detail = _break(team, job_state.name, fault, aim)
        except AssertionError as error:
            raise Missed(str(error).splitlines()[0]) from error
        self._made(team, job_state, fault, aim, detail)

    def _made(self, team: Team, job_state: JobState, fault: Fault, aim: Aim, detail: str) -> None:
        where = f"attempt {aim.attempt}"
        self.record(job_state.name, f"{fault} -- {where}{f', {detail}' if detail else ''}")
        job_state.made.append(fault)
        if fault.kind not in CONTROL:
            late = _late(job_state, fault, aim)
            # Between two attempts there is no target, but the next may just have begun.
            between = fault.moment is Moment.BETWEEN
            job_state.strikes.append(Strike(fault.kind, aim.stage, aim.attempt, late or between))
            if not between:
                job_state.struck[aim.stage] = aim.attempt

    def _suspend(self, team: Team, job_state: JobState, fault: Fault, aim: Aim) -> None:
        patiently(lambda: team.patch(job_state.name, {"runPolicy": {"suspend": True}}))
        self._made(team, job_state, fault, aim, "")
        time.sleep(fault.seconds)
        patiently(lambda: team.patch(job_state.name, {"runPolicy": {"suspend": False}}))

    def _node_off(self, team: Team, job_state: JobState, fault: Fault, aim: Aim) -> None:
        with self._outage:
            with self._hand:
                if not set(aim.pods) <= set(living(team.box, team.namespace)):
                    raise Missed("it is over meanwhile")
                pods = patiently(lambda: team.box.api.items(path_of("v1", "pods", team.namespace)))
                place = {pod["metadata"]["name"]: pod["spec"].get("nodeName") for pod in pods}
                node = place.get(aim.pod(fault))
                if node is None:
                    raise Missed("its pod is gone")
                there = [pod for pod in pods if pod["spec"].get("nodeName") == node]
                off = ExitStack()
                off.enter_context(faults.node_off(team.box, node))
                self._made(team, job_state, fault, aim, node)
                self._struck_too(job_state, there)
            try:
                time.sleep(fault.seconds)
            finally:
                with self._hand:
                    off.close()

    def _struck_too(self, job_state: JobState, pods: Sequence[Object]) -> None:
        """Record a strike for other jobs with a pod on a node that lost its power."""
        names = {one.name: one for one in self.states.values()}
        for pod in pods:
            named = _POD.match(pod["metadata"]["name"])
            if named is None or pod["status"].get("phase") in TERMINAL or named["job"] == job_state.name:
                continue
            if (other := names.get(named["job"])) is not None:
                self.record(other.name, f"has pod {named[0]} on that node")
                other.strikes.append(Strike(Kind.NODE_OFF, named["stage"], int(named["attempt"]), late=True))

    # ------------------------------------------------------------------------------------------------- the operator

    def _operator_logs(self) -> dict[int, int]:
        """Return inode -> size of the operator's log files: a container's restart renames them."""
        return {file.stat().st_ino: file.stat().st_size for file in self._log_files()}

    def _log_files(self) -> list[Path]:
        folder = self.team.box.own("reading logs") / "kubelet" / "logs"
        return sorted(folder.glob(f"{NAMESPACE}_finetune-operator-*.log*"))

    def operator_logs(self) -> str:
        """Return the operators' logs since the storm began, across restarts."""
        parts = []
        for file in self._log_files():
            with file.open("rb") as stream:
                stream.seek(self.log_sizes.get(file.stat().st_ino, 0))
                parts.append(f"--- {file.name}\n" + stream.read().decode(errors="replace"))
        return "\n".join(parts)


def patiently(call: Callable[[], T], seconds: float = 60) -> T:
    """Return the value of `call`, as soon as an API server answers."""
    end = time.monotonic() + patient(seconds)
    while True:
        try:
            return call()
        except (requests.ConnectionError, requests.Timeout):
            if time.monotonic() > end:
                raise
        except ApiError as error:
            if error.code not in _PASSES or time.monotonic() > end:
                raise
        time.sleep(0.2)


def _apply(team: Team, name: str, spec: Object) -> None:
    body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}

    def apply() -> bool:
        try:
            team.box.api.create(path_of(API_VERSION, PLURAL, team.namespace), body)
        except ApiError as error:
            # Created by a request whose answer was lost.
            if error.code != 409:
                raise
        return True

    patiently(apply)


def _look(team: Team, job_state: JobState) -> Object:
    """Return the job's status; empty while it cannot be read."""
    try:
        found = team.box.api.get(path_of(API_VERSION, PLURAL, team.namespace, job_state.name)) or {}
        if job_state.folder is None and found.get("status", {}).get("stages"):
            job_state.folder = team.results(job_state.name)
    except (requests.ConnectionError, requests.Timeout, ApiError, AssertionError, KeyError):
        return {}
    status: Object = found.get("status", {})
    if status != job_state.news[0]:
        job_state.news = (status, time.monotonic())
    return status


def _aim(team: Team, job_state: JobState, fault: Fault, status: Object) -> Aim | None:
    """Return the attempt if it is at the fault's moment."""
    stage, struck = stage_of(status, fault.stage), job_state.struck.get(fault.stage, 0)
    known, state = stage.get("attempt", 0), stage.get("state")
    pods = [one for one in living(team.box, team.namespace) if (one.job, one.stage) == (job_state.name, fault.stage)]
    attempt = max((one.attempt for one in pods), default=0)
    ours = tuple(one for one in pods if one.attempt == attempt)
    fresh = fault.kind in CONTROL or attempt > struck
    match fault.moment:
        case Moment.MADE:
            there = state == "Running" and (fault.kind in CONTROL or known > struck)
            return Aim(fault.stage, known, tuple(one for one in ours if one.attempt == known)) if there else None
        case Moment.BETWEEN:
            if known and state in ("Failed", "Suspended"):
                return Aim(fault.stage, known + 1)
            return Aim(fault.stage, known) if known > struck else None
        case Moment.BEGUN if fresh and ours:
            return _with_ranks(team, fault, Aim(fault.stage, attempt, ours))
        case Moment.STEP if (
            fresh and ours and steps_of(job_state, since=min(one.began for one in ours)) >= _step(fault)
        ):
            reported = known == attempt and status.get("progress", {}).get("step", 0) > 0
            return (
                _with_ranks(team, fault, Aim(fault.stage, attempt, ours))
                if reported or fault.kind != Kind.HANG
                else None
            )
    return None


def _step(fault: Fault) -> int:
    return max(1, round(fault.share * STEPS))


def _with_ranks(team: Team, fault: Fault, aim: Aim) -> Aim | None:
    """Keep only pods with a running process of the training, for faults that need one."""
    if fault.kind not in RANKS:
        return aim
    pods = tuple(one for one in aim.pods if faults.ranks(team, one.pod))
    return replace(aim, pods=pods) if pods else None


def steps_of(job_state: JobState, since: float = 0.0) -> int:
    """Return the last step in the training's history if it was written after `since`; else 0."""
    if job_state.folder is None:
        return 0
    file = JobPaths(job_state.folder).history
    try:
        return last_step(file) if file.stat().st_mtime > since else 0
    except FileNotFoundError:
        return 0


def _late(job_state: JobState, fault: Fault, aim: Aim) -> bool:
    """Return whether the attempt may have finished before the fault took effect."""
    began = min((one.began for one in aim.pods), default=math.inf)
    step = steps_of(job_state, since=began) if aim.stage == TRAIN else 0
    if step:
        return step > _LATE_SHARE * STEPS
    # A container's first process ignores SIGTERM before it has a handler, and may be done within the grace period.
    return fault.kind in GRACEFUL or any(time.time() - one.began > _STARTING_SECONDS for one in aim.pods)


def _kill_operator(team: Team, which: Literal["acting", "all"]) -> str:
    try:
        hit = patiently(lambda: faults.kill_operator(team.box, which))
    except AssertionError as error:
        raise Missed(str(error).splitlines()[0]) from error
    if not hit:
        raise Missed("none is running")
    return ", ".join(hit)


def _break(team: Team, job: str, fault: Fault, aim: Aim) -> str:
    """Inject an instantaneous fault; return its target."""
    match fault.kind:
        case Kind.DELETE_CHILD:
            return patiently(lambda: faults.delete_child(team, job, aim.stage))
        case Kind.KILL_POD:
            faults.kill_pod(team, aim.pod(fault))
        case Kind.KILL_RANK:
            return f"rank {faults.kill_rank(team, aim.pod(fault))}"
        case Kind.CRASH_RANK:
            return f"rank {faults.signal_rank(team, aim.pod(fault), faults.signal.SIGSEGV)}"
        case Kind.RAISE:
            return f"rank {faults.raise_in_rank(team, aim.pod(fault))}"
        case Kind.HANG:
            return f"rank {faults.hang_rank(team, aim.pod(fault))}"
        case Kind.MEMORY:
            faults.exhaust_memory(team, aim.pod(fault))
        case Kind.DELETE_POD:
            patiently(lambda: faults.delete_pod(team, aim.pod(fault)))
        case Kind.PREEMPT:
            faults.preempt(team, aim.pod(fault), "taint")
        case Kind.SHUT_DOWN:
            faults.preempt(team, aim.pod(fault), "shutdown")
        case _:
            raise AssertionError(f"{fault.kind} is not made at once")
    return aim.pod(fault)
