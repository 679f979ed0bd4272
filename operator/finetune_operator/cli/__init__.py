"""The finetune command."""
