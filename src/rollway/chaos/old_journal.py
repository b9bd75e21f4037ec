import sys

from rollway import cli

if __name__ == "__main__":
    sys.exit(cli.main())
