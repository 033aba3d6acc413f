"""Generators of documentation and measurements of compiled programs, outside the package."""
