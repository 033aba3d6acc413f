"""Images as data: where they come from, and how each becomes a row of a batch."""
