"""The resource: its fields, its rules, its CRD."""
