"""`python -m finetune_trainer STAGE --job job.json --workspace DIR`: runs one rank of a stage (`rank.py`). In a pod and
below `finetune run`, `launch STAGE ...` starts the stage's ranks, and `sshd` waits for those of mpirun (`launching/`).
`serve` answers requests with the job's model (`serving/`).

Only imports that all of them need are here, so that a launcher starts its ranks at once.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from finetune_contract.layout import EXIT_OK
from finetune_contract.python_command import ENV_SAFE_PATH
from finetune_contract.utf8_mode import utf8_command
from finetune_trainer.core.orderly_exit import let_collectives_end, settle_exit


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the console script."""
    if (command := utf8_command()) is not None:
        # Processes that this one starts inherit the mode.
        os.execve(command[0], command, {**os.environ, "PYTHONUTF8": "1"})
    os.environ[ENV_SAFE_PATH] = "1"  # for the processes that torch, Spark and others start
    code = run(sys.argv[1:] if argv is None else argv)
    logging.shutdown()
    if code == EXIT_OK:
        let_collectives_end()
        settle_exit()
    # A process group whose peers have exited, or a thread inside a collective, can delay an orderly end for minutes;
    # tearing down the objects of torch and transformers takes another second or two.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(argv: Sequence[str]) -> int:
    """Run the command of `argv` and return the exit code."""
    if argv[:1] == ["launch"]:
        from finetune_trainer.launching.launch import launch

        return launch(argv[1:])
    if argv[:1] == ["sshd"]:
        from finetune_trainer.launching.sshd import serve

        return serve(argv[1:])
    if argv[:1] == ["serve"]:
        from finetune_trainer.serving.serve import serve as serve_model

        return serve_model(argv[1:])
    from finetune_trainer.stage.rank import run as run_rank

    return run_rank(argv)


if __name__ == "__main__":
    main()
