"""Amounts of memory and storage: units in bytes, and text."""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30
_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def human_bytes(count: float) -> str:
    """Format bytes in the largest binary unit that leaves at least 1, with one decimal: `31.5 GiB`."""
    size = float(count)
    for unit in _BINARY_UNITS[:-1]:
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_BINARY_UNITS[-1]}"
