"""Arrays of workers: references to them, trees of them, and their transfer between groups."""
