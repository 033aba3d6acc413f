"""The environments that come with Argosy, one per file. They run in separate processes, and import little beyond the standard library.
"""
