"""What can be typed, by topic; `cli.main` puts the commands together."""
