"""Files and facts that a job leaves for people and plans. Computes no result."""
