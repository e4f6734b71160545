"""The console script: Ctrl-C while the commands are still loading."""

from __future__ import annotations

import subprocess
import sys
import textwrap

INTERRUPTED = 130


def test_an_interrupt_while_commands_load_is_quiet() -> None:
    """The signal comes from an import, so that its time does not depend on the machine."""
    code = textwrap.dedent(
        """
        import os, signal, sys
        from danube_fast.cli import entry

        class Interrupting:
            def find_spec(self, name, path=None, target=None):
                if name == "danube_fast.cli.main":
                    os.kill(os.getpid(), signal.SIGINT)
                return None

        sys.meta_path.insert(0, Interrupting())
        entry.run()
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "")
