"""Facts of the Gateway API's kind that leads requests to Services. This module imports nothing, as kserve_kind.py."""

from __future__ import annotations

GATEWAY_GROUP = "gateway.networking.k8s.io"
ROUTE_API = f"{GATEWAY_GROUP}/v1"
"""Version of HTTPRoute since Gateway API 1.0."""
ROUTE_KIND = "HTTPRoute"
ROUTE_PLURAL = "httproutes"
GATEWAY_KIND = "Gateway"
GATEWAY_LABEL = f"{GATEWAY_GROUP}/gateway-name"
"""Label of the pods that a controller runs for a Gateway; its value is the Gateway's name (GEP-1762)."""
