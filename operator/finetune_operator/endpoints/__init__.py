"""Endpoints that serve a model: plan, objects, decisions. Pure, as `plan` and `jobs`; a runtime touches this folder."""
