"""What a stage prints: a few plain lines on stderr of rank 0, warnings of the other ranks with their rank, no library
chatter.
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
    """Sets up logging of this process."""
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
    """To be called before the heavy imports, because some libraries log while imported. Not for a user's own program:
    what that prints is its author's to say.
    """
    # Read by torch, transformers, datasets and the Hub client when they are imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DATASETS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore")


def quiet_transformers() -> None:
    """Switches off the progress bars of transformers, for which there is no variable."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
