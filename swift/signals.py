"""The signals that ask a process to stop."""

import signal


def stop_signals() -> list[signal.Signals]:
    """Lists Ctrl-C, SIGTERM and SIGHUP, that of a closed terminal, unless the caller has it ignored (``nohup``)."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if is_ignored else [signal.SIGHUP])]
