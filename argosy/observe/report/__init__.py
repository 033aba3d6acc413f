"""Renders a run as one HTML page."""
