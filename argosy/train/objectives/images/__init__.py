"""Objectives over images: denoisers."""
