"""Checks the address of a server that is a teacher, and names the environment variables of its key. Standard library only."""

from urllib.parse import urlsplit

from argosy.core.errors import BadInput

# Variables of the environment, the first one that is set counts.
KEYS = ("ARGOSY_TEACHER_KEY", "OPENAI_API_KEY")


def is_endpoint(teacher: str) -> bool:
    return teacher.startswith(("http://", "https://"))


def check_address(url: str) -> None:
    """Checks the address of a server.

    Raises:
        BadInput: the address has no host, contains a secret that would be stored with the settings, or has a part that would be
            ignored.
    """
    parts, where = urlsplit(url), "objective.teacher"
    if parts.username is not None or parts.password is not None:
        # Not shown: it holds a password.
        problem = "the address of the teacher holds a name or a password, which would be kept with the settings"
        raise BadInput(problem, where=where, hint=f"set {KEYS[0]} in the environment")
    if not parts.hostname or parts.query or parts.fragment:
        problem = f"`{parts.scheme}://{parts.netloc}{parts.path}` is not the address of a server"
        raise BadInput(problem, where=where, hint="http://localhost:8000/v1")
