"""From the backbone's output to labels or text."""
