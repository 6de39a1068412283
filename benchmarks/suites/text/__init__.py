"""The text suite: all-MiniLM-L6-v2 with mean pooling, and classification tasks of many kinds."""
