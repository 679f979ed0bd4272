"""Plan a job from its spec and facts. Pure."""
