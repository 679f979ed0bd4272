"""The `finetune` command. Decides nothing about a plan, and writes to a cluster only what a person asks for."""
