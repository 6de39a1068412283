"""The suite of a language model: SmolLM2-135M-Instruct and LoRA adapters that answer, with and without instructions."""
