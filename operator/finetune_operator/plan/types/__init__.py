"""Values of planning: the draft that decisions fill, and the finished plan. Decides nothing."""
