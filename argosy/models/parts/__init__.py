"""The parts models are made of. A part earns its place here when two families use it."""
