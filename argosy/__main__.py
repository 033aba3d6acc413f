"""`python -m argosy` is `argosy`.

Signals wait until `core.process.signals` takes them: a Ctrl-C during the first imports would end in a traceback.
"""

import signal
import sys

if __name__ == "__main__":
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    from argosy.cli import main

    sys.exit(main())
