"""The Hugging Face Hub: names of models there, and the way of their files to this machine and back."""
