"""From prompts to updates."""
