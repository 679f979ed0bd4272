"""The operator's start beside a CRD of an earlier release."""

from __future__ import annotations

import asyncio
import logging

from finetune_operator.controller.cluster.kube import Kube
from finetune_operator.kubernetes_api.errors import ApiError, TooManyRequestsError, UnavailableError
from finetune_operator.spec.schema.served_schema import OPENAPI_PATH, UPGRADE, in_status, lacking, listed

log = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0
OUTAGE_TRIES = 24
"""Tries at an API server that is down or busy, two minutes or more: it may have all but this document."""
WAY_OUT = f"Apply the CRD of this release: {UPGRADE}."


async def wait_for_status_fields(kube: Kube) -> None:
    """Wait until the API server accepts all fields that this release writes to statuses. Otherwise jobs would run
    without a recorded state. Fields that only users set are logged. A schema that cannot be read holds up nothing,
    except for OUTAGE_TRIES in which the API server is unavailable or busy.
    """
    told: tuple[str, ...] = ()
    tries = OUTAGE_TRIES
    while True:
        try:
            differences = lacking(await kube.document(OPENAPI_PATH, "discovery"))
        except ApiError as error:
            if isinstance(error, UnavailableError | TooManyRequestsError) and tries > 1:
                tries -= 1
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            log.info("cannot compare the CRD of FineTuneJob with this release: %s", error)
            return
        status = in_status(differences)
        if differences and differences != told:
            held = "No job is reconciled until it has those of status. " if status else ""
            log.warning("the CRD of FineTuneJob lacks %s. %s%s", listed(status or differences), held, WAY_OUT)
            told = differences
        if not status:
            return
        await asyncio.sleep(AGAIN_SECONDS)
