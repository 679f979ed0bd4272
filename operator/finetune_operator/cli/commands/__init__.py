"""Commands by topic; `cli.main` puts them together."""
