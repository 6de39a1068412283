"""The folder that a merge writes and everything else reads: its format, its one reader, what can be said of it."""
