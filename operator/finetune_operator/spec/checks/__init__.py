"""Checks of a document against types, rules and settings. Returns problems; never stops at the first."""
