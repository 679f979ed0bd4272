"""The FineTuneJob as people write it: types, rules, hints, checks, schema. Knows nothing of plans, pods or clusters."""
