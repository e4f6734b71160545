"""A module that starts a thread as it is imported, as agents do."""

from __future__ import annotations

import threading

_thread = threading.Thread(target=threading.Event().wait, daemon=True)
_thread.start()
