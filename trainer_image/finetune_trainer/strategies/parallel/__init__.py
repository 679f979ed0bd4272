"""Models, optimizers and rows split over processes. Knows no task."""
