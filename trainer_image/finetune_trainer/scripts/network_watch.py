"""Network of a user's own program on several nodes, by NCCL's log, which this process reads while the program runs.

The built-in loop connects all GPUs before it loads a model. A program creates its communicators when it wants to, and
any number of them: so only what NCCL sends with between nodes is read, and the program is stopped as soon as it is
known that NCCL uses sockets in place of the devices that the plan has.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING

from finetune_contract.report import Communication
from finetune_trainer.core.failures import StageError
from finetune_trainer.devices.nccl import (
    nccl_log,
    refuse_sockets,
    settle_nccl_log,
    unusable_network,
    warn_of_locked_memory,
)
from finetune_trainer.devices.nccl_log import network_of

if TYPE_CHECKING:
    from finetune_contract.trainer_job import World

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Interval between two readings of the log, until it has a network."""


class NetworkWatch:
    """Watch over the program of one rank."""

    def __init__(self, environment: Mapping[str, str], world: World, stop: Callable[[], None]) -> None:
        """`environment`: the program's; `stop` ends it at once, and is called in a thread."""
        self._environment = environment
        self._world = world
        self._stop = stop
        self._ended = threading.Event()
        self._refused: StageError | None = None
        self._thread = threading.Thread(target=self._look, name="network", daemon=True)

    def start(self) -> None:
        """Begin, once the program has started."""
        self._thread.start()

    def end(self, *, failed: bool) -> Communication | None:
        """Return the network that the ended program has used; None if its log is not ours or has none. Raise StageError
        STRATEGY_NOT_IN_EFFECT if the program was stopped for it, or `failed` as the planned devices cannot be used.
        """
        self._ended.set()
        self._thread.join()
        if self._refused is not None:
            raise self._refused
        text = nccl_log(self._environment)
        if failed and (reason := unusable_network(self._world.network, text)) is not None:
            raise reason
        communication = network_of(text)
        try:
            refuse_sockets(communication, self._world.network)
        except StageError as late:  # it has ended by itself, with its result
            log.warning("%s %s", late.message, late.hint)
        return communication

    def _look(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            communication = network_of(nccl_log(self._environment))
            if communication is None:
                continue
            log.info("NCCL %s: %s.", communication.library or "", communication.words)
            try:
                refuse_sockets(communication, self._world.network)
            except StageError as error:
                self._refused = error
                self._stop()
            return


class NoWatch:
    """Watch over a program that sends nothing by NCCL between nodes."""

    def start(self) -> None:
        """Do nothing."""

    def end(self, *, failed: bool) -> Communication | None:
        """Return None."""
        return None


def network_watch(
    environment: MutableMapping[str, str], world: World, rank: int, stop: Callable[[], None]
) -> NetworkWatch | NoWatch:
    """Return the watch over a program with that environment, in which NCCL's log goes into a file, unless the user has
    set NCCL_DEBUG.
    """
    if world.device == "cpu" or world.nodes == 1:
        return NoWatch()
    settle_nccl_log(environment, rank)
    if world.network is not None and rank == 0:
        warn_of_locked_memory(world.network)
    return NetworkWatch(environment, world, stop)
