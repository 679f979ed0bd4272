"""Values that a decision reads and changes. Knows no cause of a failure."""
