"""Facts of KServe's kind that runs an endpoint's servers. This module imports nothing, as launcher_rows.py."""

from __future__ import annotations

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
