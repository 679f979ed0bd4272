"""Importing this exempts everything that was imported before from garbage collection: for a fork server, which imports
modules by name and calls nothing. A forked process would copy the whole heap in its first search for garbage.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
