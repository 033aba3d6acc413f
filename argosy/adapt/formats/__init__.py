"""Number formats: what each of them stores, and how floats are rounded to it."""
