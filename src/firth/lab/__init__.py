"""A question to an experiment, a table, a page."""
