"""Fields as a tree: shapes, names, marks of support. Reads the types; knows no rule."""
