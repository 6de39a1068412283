"""From an input to the tasks that answer it: first pass, voters, decision, candidates."""
