"""The facts of KServe's kind that runs an endpoint's servers. Nothing is imported here, as in launcher_rows.py."""

from __future__ import annotations

KSERVE_GROUP = "serving.kserve.io"
KSERVE_API = f"{KSERVE_GROUP}/v1beta1"
KSERVE_KIND = "InferenceService"
KSERVE_PLURAL = "inferenceservices"
KSERVE_LABEL = f"{KSERVE_GROUP}/inferenceservice"
"""Of what KServe makes of an InferenceService, with its name."""
DEPLOYMENT_MODE = f"{KSERVE_GROUP}/deploymentMode"
"""Annotation. `Standard`: KServe makes a Deployment, and nothing of Knative's."""
AUTOSCALER_CLASS = f"{KSERVE_GROUP}/autoscalerClass"
"""Annotation. `none`: KServe keeps the number of servers; `external`: an autoscaler that is not KServe's does."""
TAKEN_VARIABLES = ("MULTI_MODEL_SERVER", "PROTOCOL", "PYTHONPATH", "STORAGE_URI")
"""Variables that KServe refuses or reads (kserve 0.20, pkg/validation/env_policy.go and pkg/constants/constants.go)."""
TAKEN_LABELS = ("app", "component")
"""Labels that KServe sets on pods itself (pkg/controller/v1beta1/inferenceservice/components/predictor.go there)."""
