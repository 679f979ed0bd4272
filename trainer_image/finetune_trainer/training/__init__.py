"""The train stage: the loop and its collaborators."""
