"""Choice among the forms of a training, and the refusal of one that fits nowhere. Estimates by `memory` and `time`."""
