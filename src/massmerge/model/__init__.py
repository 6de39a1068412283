"""A loaded bundle: from an input without a task name to an answer."""
