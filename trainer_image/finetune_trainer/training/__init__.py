"""The stage train: the loop and its collaborators. Knows no other stage."""
