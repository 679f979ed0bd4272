"""A schedule for loops that need no checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune_trainer.training.loop_parts import LoopSchedule


class NoCheckpoints:
    """Saver that never saves."""

    writing = False

    def wants(self) -> bool:
        return False

    def due(self, step: int, *, by_clock: bool) -> bool:
        return False


def to_the_last_step() -> LoopSchedule:
    """Return the schedule of a loop without checkpoints that nothing ends early."""
    from finetune_trainer.core.interruption import Interruption
    from finetune_trainer.training.loop_parts import LoopSchedule
    from finetune_trainer.training.stopping import NeverStop

    saver: Any = NoCheckpoints()
    return LoopSchedule(saver, NeverStop(), Interruption(), save_on_preemption=False)
