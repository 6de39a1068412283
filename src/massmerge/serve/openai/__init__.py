"""OpenAI's protocol: completions that this service writes, or that an upstream does."""
