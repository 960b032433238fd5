"""``python -m dsv4_prologue`` is ``dsv4-prologue``."""

from dsv4_prologue.cli import main

if __name__ == "__main__":
    main()
