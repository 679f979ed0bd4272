"""Facts of vLLM's server, which runs an endpoint's servers with `endpoint.optimization: vllm`. This module imports
nothing, as launcher_rows.py.

All were read in vLLM 0.33.0, the version of `defaults.vllmImage`; another version in the settings has to have them.
"""

from __future__ import annotations

VLLM_COMMAND = ("python3", "-m", "vllm.entrypoints.cli.main", "serve")
"""The program `vllm serve`, as a module, so that Python finds the middleware in the working directory."""
VLLM_KEY = "VLLM_API_KEY"
"""Variable with the bearer token of requests (`vllm/envs.py`)."""
VLLM_HEALTH_PATH = "/health"
"""Probe that answers once the model is loaded, and 503 when the engine has failed."""
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `--max-lora-rank` from 8 on (`MaxLoRARanks` of `vllm/config/lora.py`)."""
VLLM_IN_FLIGHT = "vllm:num_requests_running"
"""Gauge of requests that are computed; those that wait are in `vllm:num_requests_waiting`."""
