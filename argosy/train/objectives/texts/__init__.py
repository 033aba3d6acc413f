"""Objectives over texts that are scored or embedded whole: classes, documents for a query, vectors that are near to one another."""
