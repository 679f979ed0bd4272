"""Address and credentials of the API server: from the kubeconfig, or from the pod around this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune_operator.kubernetes_api.errors import NoClusterError, in_one_line

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def is_configured(kubeconfig: Path | None) -> bool:
    """Return whether there is a kubeconfig, or this is a pod."""
    return any(file.is_file() for file in _kubeconfigs(kubeconfig)) or "KUBERNETES_SERVICE_HOST" in os.environ


def _kubeconfigs(named: Path | None) -> list[Path]:
    """Return the files that hold the configuration: the one named, else those of KUBECONFIG, else ~/.kube/config."""
    text = str(named) if named is not None else os.environ.get("KUBECONFIG") or "~/.kube/config"
    # Path.expanduser raises where there is no home, as in a pod.
    return [Path(os.path.expanduser(file)) for file in text.split(os.pathsep) if file]  # noqa: PTH111


async def configure(configuration: Any, kubeconfig: Path | None, context: str | None) -> str:
    """Fill in server and credentials; return the default namespace. NoClusterError.

    As kubectl does: from the kubeconfig, or without one from the service account of the pod around this process.
    """
    from kubernetes.aio import config
    from yaml import YAMLError

    files = _kubeconfigs(kubeconfig)
    if kubeconfig is not None and not kubeconfig.is_file():
        raise NoClusterError(f"--kubeconfig {kubeconfig}: the file does not exist")
    if not any(file.is_file() for file in files):
        if context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            try:
                config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            except (config.ConfigException, OSError) as error:
                raise NoClusterError(f"the service account of this pod cannot be used: {in_one_line(error)}") from error
            return _NAMESPACE_FILE.read_text(encoding="utf-8").strip() if _NAMESPACE_FILE.is_file() else "default"
        listed = ", ".join(str(file) for file in files)
        raise NoClusterError(
            f"no cluster is configured: {listed} does not exist. Set KUBECONFIG, or pass --kubeconfig FILE"
        )
    text = os.pathsep.join(str(file) for file in files)
    _check_context(text, context)
    try:
        loader: Any = await config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=text, context=context, client_configuration=configuration, persist_config=False
        )
    except (config.ConfigException, YAMLError, OSError, KeyError, ValueError, TypeError) as error:
        raise NoClusterError(f"the kubeconfig {text} cannot be used: {in_one_line(error)}") from error
    current: Mapping[str, Any] = loader.current_context.get("context") or {}
    return str(current.get("namespace") or "default")


def _check_context(text: str, context: str | None) -> None:
    """Raise NoClusterError with the existing contexts if `context` is not among them."""
    from kubernetes.aio.config.kube_config import KubeConfigMerger
    from yaml import YAMLError

    try:
        merged: Any = KubeConfigMerger(text).config  # type: ignore[no-untyped-call]
        value = merged.value if merged is not None else {}
        current = context or value.get("current-context") or ""
        contexts = [entry["name"] for entry in value.get("contexts") or ()]
    except (YAMLError, OSError, AttributeError, KeyError, TypeError) as error:
        raise NoClusterError(f"the kubeconfig {text} cannot be read: {in_one_line(error)}") from error
    listed = ", ".join(contexts) or "none"
    if not current:
        raise NoClusterError(
            f"the kubeconfig {text} has no current context; select one with --context (it has {listed})"
        )
    if current not in contexts:
        raise NoClusterError(f"the kubeconfig {text} has no context {current}; it has {listed}")
