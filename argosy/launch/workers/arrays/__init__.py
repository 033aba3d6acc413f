"""Arrays of workers: references to them, trees of them, and their way from group to group."""
