"""Settings of an administrator as models. Reads no file; `documents` does."""
