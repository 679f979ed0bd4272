"""The FineTuneJob resource: its fields, its rules, its CRD."""
