"""Number formats: what each stores, and how floats are rounded to it."""
