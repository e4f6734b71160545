"""Whether a data directory may be opened: not by a broker that asks no one, if it is of a secured one, nor with files of a
secured one that others may write."""

from __future__ import annotations

import stat
from pathlib import Path

from danube_fast.config import Settings
from danube_fast.errors import FailedPrecondition
from danube_fast.workers.supervisor.datadir import DataDirectory
from danube_fast.workers.supervisor.output import Output

__all__ = ["check_exposure"]

NAMES_MAX = 5


def check_exposure(settings: Settings, directory: DataDirectory, lines: Output) -> None:
    """Refuse to open what was secured before, and to take the word of records that others can write. Raises
    FailedPrecondition."""
    from danube_fast.security.server_keys import secured_by  # it loads ZeroMQ

    folder = directory.path
    if settings.auth == "none":
        if not (files := secured_by(folder)):
            return
        if not settings.insecure:
            raise FailedPrecondition(
                f"{folder} is of a secured broker ({', '.join(files)}), and with auth none all who reach it could do everything: "
                "start it with --auth required, as before (DANUBE_AUTH, --config); if all are to come in, with --insecure, of "
                "this host alone with --listen 127.0.0.1:PORT, too"
            )
        lines.note(
            f"warning: {folder} is of a secured broker, and all who reach it may do everything now (--insecure)"
        )
        return
    if not any(map(_is_open, (folder, *folder.glob("*"), *folder.glob("*/*")))):
        return
    # it loads NumPy, for which this process has no other use
    from danube_fast.workers.supervisor.contents import makes_administrator, open_names

    names = open_names(folder, stat.S_IWOTH)
    is_ruled = any(makes_administrator(name) for name in names)
    if folder.stat().st_mode & stat.S_IWOTH:
        names.insert(0, str(folder))
        is_ruled = True
    if names:
        so = ", and so become administrator" if is_ruled else ""
        raise FailedPrecondition(
            f"every user of this host may write in {folder}{so}: {', '.join(names[:NAMES_MAX])}; see "
            f"that all there is yours, and run chmod -R o-w {folder}, or name another folder with --data-dir"
        )


def _is_open(path: Path) -> bool:
    """Whether every user may write to a file or folder."""
    try:
        return bool(path.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return False
