"""Facts of the KEDA HTTP add-on's kind that scales servers to zero. This module imports nothing, as kserve_kind.py."""

from __future__ import annotations

IDLE_GROUP = "http.keda.sh"
IDLE_API = f"{IDLE_GROUP}/v1alpha1"
IDLE_KIND = "HTTPScaledObject"
"""The fields in use are those since version 0.11 (config/crd/bases of kedacore/http-add-on)."""
IDLE_PLURAL = "httpscaledobjects"
