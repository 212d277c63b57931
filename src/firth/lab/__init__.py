"""A claim to an experiment, a table, a picture."""
