"""Reads and writes model folders in the layout of the Hugging Face Hub."""
