"""Data that operator and trainer exchange, and nothing else.

Both sides import this package; it imports only pydantic. A fact that both sides must agree on (a name, an exit code, a
path, a file's shape) lives here once, so that neither side can drift from the other.
"""
