"""Choose which cases of a grid run in CI and which only in `make test-everything`."""
