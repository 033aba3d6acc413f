"""Describes an exception in one line."""

import os
import re


def root_of(failure: BaseException) -> str:
    """Returns the first line of the innermost cause. From an error of TensorStore, which gives the system's reason after hundreds of
    characters, only that reason is returned."""
    while failure.__cause__ is not None:
        failure = failure.__cause__
    if reason := re.search(r"os_error_code='(\d+)'", str(failure)):
        return f"[Errno {reason[1]}] {os.strerror(int(reason[1]))}"
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0][:200]
