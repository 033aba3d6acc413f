"""Models at rest: Hub folders, GGUF files, PEFT adapters, and how they become one another."""
