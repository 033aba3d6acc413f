"""`argosy quickstart`: trains, kills, resumes, exports and uses a first model, act by act."""
