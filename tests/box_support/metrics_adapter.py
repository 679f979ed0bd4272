"""A custom metrics API for autoscalers: a metric of pods, read from each pod's /metrics when it is requested.

Adapters such as prometheus-adapter serve the same API from a Prometheus. This one needs only the standard library, as
it runs as a script in the trainer's image.

    python metrics_adapter.py --port 8443 --certificate FILE --key FILE --metric NAME --pod-port 8080 \
        --timeout-seconds 10
"""

from __future__ import annotations

import argparse
import json
import os
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

GROUP_VERSION = "custom.metrics.k8s.io/v1beta2"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Adapter(ThreadingHTTPServer):
    """Server of one metric."""

    def __init__(self, port: int, metric: str, pod_port: int, timeout_seconds: float) -> None:
        super().__init__(("0.0.0.0", port), Handler)
        self.metric, self.pod_port, self.timeout_seconds = metric, pod_port, timeout_seconds
        self.path = re.compile(
            f"/apis/{GROUP_VERSION}/namespaces/(?P<namespace>[^/]+)/pods/(?:\\*|%2A)/{re.escape(metric)}"
        )

    def resources(self) -> dict[str, Any]:
        """Return the discovery document."""
        one = {"name": f"pods/{self.metric}", "singularName": "", "namespaced": True, "kind": "MetricValueList"}
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": GROUP_VERSION,
            "resources": [{**one, "verbs": ["get"]}],
        }

    def values(self, namespace: str, selector: str) -> dict[str, Any]:
        """Return the metric of the selected pods that answer; one that does not is left out."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        items = []
        for name, address in self._pods(namespace, selector):
            try:
                value = self._scraped(address)
            except (OSError, ValueError) as error:
                print(f"{namespace}/{name} at {address}: {error!r}")
                continue
            print(f"{namespace}/{name}: {value}")
            pod = {"kind": "Pod", "namespace": namespace, "name": name, "apiVersion": "/v1"}
            item = {"describedObject": pod, "metric": {"name": self.metric, "selector": None}, "timestamp": now}
            items.append({**item, "value": f"{round(value * 1000)}m"})
        return {"kind": "MetricValueList", "apiVersion": GROUP_VERSION, "metadata": {}, "items": items}

    def _pods(self, namespace: str, selector: str) -> list[tuple[str, str]]:
        """Return name and address of the selected pods that have an address."""
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        query = urllib.parse.urlencode({"labelSelector": selector})
        request = urllib.request.Request(
            f"https://{host}:{port}/api/v1/namespaces/{namespace}/pods?{query}",
            headers={"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"},
        )
        context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
        with urllib.request.urlopen(request, context=context, timeout=self.timeout_seconds) as reply:
            pods = json.load(reply)["items"]
        return [(pod["metadata"]["name"], ip) for pod in pods if (ip := pod["status"].get("podIP"))]

    def _scraped(self, address: str) -> float:
        """Return the metric of the pod at this address. OSError, or ValueError if it exports no such metric."""
        url = f"http://{address}:{self.pod_port}/metrics"
        with urllib.request.urlopen(url, timeout=self.timeout_seconds) as reply:
            text = reply.read().decode()
        found = re.search(rf"^{re.escape(self.metric)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        if found is None:
            raise ValueError(f"no metric {self.metric}")
        return float(found[1])


class Handler(BaseHTTPRequestHandler):
    """Requests of the API server."""

    server: Adapter
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer discovery and values; 404 for the rest."""
        parts = urllib.parse.urlsplit(self.path)
        selector = urllib.parse.parse_qs(parts.query).get("labelSelector", [""])[0]
        if parts.path == f"/apis/{GROUP_VERSION}":
            self._reply(200, self.server.resources())
        elif (found := self.server.path.fullmatch(parts.path)) is not None:
            self._reply(200, self.server.values(found["namespace"], selector))
        else:
            self._reply(404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound"})

    def _reply(self, code: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--certificate", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--metric", required=True)
    parser.add_argument("--pod-port", type=int, required=True)
    parser.add_argument("--timeout-seconds", type=float, required=True)
    given = parser.parse_args()
    adapter = Adapter(given.port, given.metric, given.pod_port, given.timeout_seconds)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(given.certificate, given.key)
    adapter.socket = context.wrap_socket(adapter.socket, server_side=True)
    adapter.serve_forever()


if __name__ == "__main__":
    main()
