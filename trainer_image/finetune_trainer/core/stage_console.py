"""Console output of a stage: a few plain lines on stderr of rank 0, warnings of the other ranks with their rank, no
library chatter.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

_CHATTY = (
    "bitsandbytes",
    "deepspeed",
    "DeepSpeed",
    "transformers",
    "accelerate",
    "datasets",
    "torch",
    "filelock",
    "fsspec",
    "httpx",
    "urllib3",
)


def settle_console(rank: int) -> None:
    """Set up logging of this process."""
    handler = logging.StreamHandler(sys.stderr)
    prefix = "" if rank == 0 else f"rank {rank}: "
    handler.setFormatter(logging.Formatter(prefix + "%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("finetune_trainer").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)


def quiet_libraries() -> None:
    """Silence libraries. Call it before the heavy imports, because some libraries log while imported. Not for a user's
    own program, which controls its output itself.
    """
    # Read by torch, transformers, datasets and the Hub client when they are imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DATASETS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore")


def quiet_transformers() -> None:
    """Switch off the progress bars of transformers, for which there is no variable."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
