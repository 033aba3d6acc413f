"""Lists, shows, compares and reports existing runs."""
