"""Files of the suite on nodes that run in parallel."""

from __future__ import annotations

import pytest

from box_support.phases import FILE_BYTES, fitting


@pytest.mark.parametrize(
    ("workers", "files", "expected"), [(3, 3.0, 3), (3, 2.9, 2), (3, 20.0, 3), (3, 0.5, 1), (0, 8.0, 0)]
)
def test_as_many_files_run_in_parallel_as_memory_allows(workers: int, files: float, expected: int):
    assert fitting(workers, int(files * FILE_BYTES)) == expected
