"""Facts of what others run for an endpoint: KServe, KEDA's HTTP add-on, the Gateway API and vLLM. This module imports
nothing, as launcher_rows.py.
"""

from __future__ import annotations

# --------------------------------------------------------------------------------------------------------------- KServe

KSERVE_GROUP = "serving.kserve.io"
KSERVE_API = f"{KSERVE_GROUP}/v1beta1"
KSERVE_KIND = "InferenceService"
KSERVE_PLURAL = "inferenceservices"
KSERVE_LABEL = f"{KSERVE_GROUP}/inferenceservice"
"""Label of the objects that KServe creates for an InferenceService; its value is the service's name."""
DEPLOYMENT_MODE = f"{KSERVE_GROUP}/deploymentMode"
"""Annotation. `Standard`: KServe creates a Deployment and no Knative objects."""
AUTOSCALER_CLASS = f"{KSERVE_GROUP}/autoscalerClass"
"""Annotation. `none`: a fixed number of servers; `external`: an autoscaler other than KServe's scales them."""
RESERVED_VARIABLES = ("MULTI_MODEL_SERVER", "PROTOCOL", "PYTHONPATH", "STORAGE_URI")
"""Variables that KServe refuses or reads (kserve 0.20, pkg/validation/env_policy.go and pkg/constants/constants.go)."""
RESERVED_LABELS = ("app", "component")
"""Labels that KServe sets on pods itself (pkg/controller/v1beta1/inferenceservice/components/predictor.go there)."""
MODEL_FORMAT = "huggingface"
"""Format of models that its runtime for Hugging Face models reads (config/runtimes/kserve-huggingfaceserver.yaml)."""
MODEL_FOLDER = "/mnt/models"
"""Folder at which KServe mounts a model's claim."""
RUNTIME_PREFIX = "/openai"
"""Path in front of the paths of OpenAI's API in that runtime."""
RUNTIME_HEALTH_PATH = "/v2/health/ready"
"""Probe of that runtime. Its server listens once the model is loaded (huggingfaceserver/__main__.py)."""


# --------------------------------------------------------------------------------------------------- KEDA's HTTP add-on

IDLE_GROUP = "http.keda.sh"
IDLE_API = f"{IDLE_GROUP}/v1alpha1"
IDLE_KIND = "HTTPScaledObject"
"""The fields in use are those since version 0.11 (config/crd/bases of kedacore/http-add-on)."""
IDLE_PLURAL = "httpscaledobjects"


# ---------------------------------------------------------------------------------------------------------- Gateway API

GATEWAY_GROUP = "gateway.networking.k8s.io"
ROUTE_API = f"{GATEWAY_GROUP}/v1"
"""Version of HTTPRoute since Gateway API 1.0."""
ROUTE_KIND = "HTTPRoute"
ROUTE_PLURAL = "httproutes"
GATEWAY_KIND = "Gateway"
GATEWAY_LABEL = f"{GATEWAY_GROUP}/gateway-name"
"""Label of the pods that a controller runs for a Gateway; its value is the Gateway's name (GEP-1762)."""


# -------------------------------------------------------------------------------------------------------- vLLM's server
# All were read in vLLM 0.33.0, the version of `defaults.vllmImage`; another version in the settings has to have them.

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
