"""The resource for other readers: CRD, JSON schema, reference pages, `explain`. Adds no rule."""
