"""``python -m planner``, and ``torchrun ... -m planner``: the command line."""

# The module in C below `signal`, without enum, which takes longer to import than all that is before anybody listens.
import _signal as signal  # pyright: ignore[reportMissingImports]
import gc
import os
import sys


def main() -> None:
    """Runs the command line, imports included: Ctrl-C ends those as it ends the rest."""
    listens = signal.getsignal(signal.SIGINT) != signal.SIG_IGN  # a job in the background does not
    if listens:
        signal.signal(signal.SIGINT, _leave)  # nothing has begun that would have to be ended properly
    gc.disable()  # imports leave nothing to collect
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # products of small arrays: more threads only wait
    from planner.cli.ctrl_c import import_whole, interrupt
    from planner.cli.main import load
    from planner.cli.main import main as run

    import_whole("torch", "ortools")
    load(sys.argv[1:])
    gc.enable()
    if listens:
        signal.signal(signal.SIGINT, interrupt)
    try:
        run()
    except KeyboardInterrupt:  # the second, or one between two steps
        _leave()
    except SystemExit as ended:
        if "RANK" in os.environ:  # torchrun started it
            _end_rank(ended)
        raise
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done
        gc.freeze()  # what there is ends with the process: Python need not look through it for cycles first


def rank() -> None:
    """Runs the command line as one rank that our launcher started."""
    from planner.cli.main import main as run

    try:
        run()
    except SystemExit as ended:
        _end_rank(ended)


def _end_rank(ended: SystemExit) -> None:
    """Ends a rank that has done its work with its exit code, whatever threads of torch and gloo are still at.

    One that wants to speak to an interpreter that is being taken down ends the process with SIGABRT, now and then.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended.code if isinstance(ended.code, int) else 0)


def _leave(*_signal_and_frame: object) -> None:
    sys.stderr.write("interrupted\n")
    sys.stderr.flush()
    os._exit(130)


if __name__ == "__main__":
    main()
