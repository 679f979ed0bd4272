"""A job in a cluster: what is seen of it becomes what to do. Pure: no clock, no network; the controller acts."""
