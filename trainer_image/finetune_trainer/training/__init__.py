"""The train stage: the loop and the small objects around it."""
