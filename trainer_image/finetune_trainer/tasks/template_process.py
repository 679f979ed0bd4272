"""Process that renders chat templates for `bounded_templates`, which starts it with the number of a pipe.

A template is a program by the author of the model. jinja2's sandbox keeps it from files and attributes, not from loops
and allocations, and Python cannot stop a call such as `10 ** 10 ** 9` from another thread. Here the kernel does. This
file imports nothing of ours, so that the process starts in a second.
"""

from __future__ import annotations

import pickle
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

CPU_SECONDS = 5.0
"""CPU time for one text; ordinary templates take less than a millisecond."""
REFILL_SECONDS = 0.1
"""CPU time that each text adds to what is left of `CPU_SECONDS`: their mean in the long run."""
MEMORY_BYTES = 512 << 20
"""Memory beside that of the libraries; a few times the largest conversation that any model reads."""
_STATM = Path("/proc/self/statm")


def serve(requests: Connection) -> None:
    """Answer requests, `render_jinja_template`'s arguments as a pickled dict, by `=` and the text or `!` and the error,
    until there are no more. A request that exceeds the limits ends the process.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if _STATM.exists():  # elsewhere the kernel does not limit it
        limit = int(_STATM.read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    left = CPU_SECONDS
    requests.send_bytes(b"")
    while True:
        try:
            arguments = pickle.loads(requests.recv_bytes())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, left)  # the default action of SIGPROF ends the process
        try:
            texts: Any = render_jinja_template(**arguments)
            answer = b"=" + str(texts[0][0]).encode("utf-8", "surrogatepass")
        except MemoryError:
            return
        except Exception as error:
            answer = b"!" + str(error)[:1000].encode("utf-8", "surrogatepass")
        left = min(CPU_SECONDS, signal.setitimer(signal.ITIMER_PROF, 0)[0] + REFILL_SECONDS)
        requests.send_bytes(answer)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
