"""Importing this exempts all earlier imports from garbage collection, for a fork server, which can only import modules.
A forked process would otherwise copy the whole heap in its first collection.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
