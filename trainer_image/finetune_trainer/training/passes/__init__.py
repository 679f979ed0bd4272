"""Forward and backward passes: memory, kernels, masks. Knows no schedule."""
