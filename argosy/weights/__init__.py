"""Stored models: reads and writes Hub folders, GGUF files and PEFT adapters, and converts between them."""
