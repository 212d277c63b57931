"""`prepare` as tasks that any machine can run: the shards equal those of one process, byte for byte."""
