"""Output for people: tables, bars, progress. Reads no file and no cluster."""
