"""Hints for a job that is not valid: the changes that solve its problems.

`faulty_fields` reads a job with faulty fields; `unknown_names` answers fields that do not exist, and `wrong_values`
values that a field does not accept. Names and values of other tools are rows of `foreign_names.yaml`. A hint names only
features that this version serves and the settings allow: a user who follows it has solved the problem.
"""
