"""The commands as Python functions; `firth.api` lists them. One module for each group of commands.

Functions import whatever loads torch when they run: a mistake is reported at once, and torch takes seconds to load.
"""
