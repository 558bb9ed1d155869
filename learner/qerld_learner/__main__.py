"""`python -m qerld_learner`, also reached as `qerld learner`."""

import sys

from qerld_learner.app import main

if __name__ == "__main__":
    sys.exit(main())
