"""Serve checkpoints over HTTP. FastAPI is imported when a server starts, and not before."""
