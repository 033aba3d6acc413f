"""What a run tells: numbers, words, pictures, and where its time went."""
