"""Commands by topic; `cli.main` puts them together. Texts and options only."""
