"""`argosy plan`: what a run or a server will need and do on devices that may be absent.

The analytic answer takes seconds. The compiler's takes a minute or more for large models, in a process of its own.
"""
