"""Entry of `python -m orchestrator.cli`."""

from orchestrator.cli import main

if __name__ == "__main__":
    main()
