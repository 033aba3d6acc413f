"""The Hugging Face Hub: names of models, and downloads and uploads of their files."""
