"""What a run reports: numbers, text, pictures, and where its time went."""
