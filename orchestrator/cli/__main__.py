"""Entry of `python -m orchestrator.cli`."""

from orchestrator.cli.app import main

if __name__ == "__main__":
    main()
