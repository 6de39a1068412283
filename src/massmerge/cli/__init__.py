"""The command `mass`: one file a verb."""
