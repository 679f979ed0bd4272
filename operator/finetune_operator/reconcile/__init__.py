"""From what is seen in the cluster to what to do next. Pure: no clock, no network."""
