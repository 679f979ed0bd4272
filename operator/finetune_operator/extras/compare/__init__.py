"""`finetune compare`: runs side by side. Changes no run."""
