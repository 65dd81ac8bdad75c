"""``python -m planner``, and ``torchrun ... -m planner``: the command line."""

from planner.cli.main import main

if __name__ == "__main__":
    main()
