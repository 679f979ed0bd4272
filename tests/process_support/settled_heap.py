"""Exempts all earlier imports from garbage collection when imported: for a fork server, which imports modules by name
and calls nothing. A forked process would copy the whole heap in its first collection.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
