"""What a verb does, composed of the rooms. The only place that knows them all."""
