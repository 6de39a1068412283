"""Files: tensors, YAML with line numbers, rows and tables."""
