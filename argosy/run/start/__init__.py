"""Before the first step: checks of the settings that need no model, and the initial weights."""
