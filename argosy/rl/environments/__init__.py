"""The environments that come with Argosy, one file each. They run in processes of their own, and need little beside the standard
library."""
