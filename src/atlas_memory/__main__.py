"""python -m atlas_memory: the command line, for launchers that start modules."""

from atlas_memory.cli import app

if __name__ == "__main__":
    app()
