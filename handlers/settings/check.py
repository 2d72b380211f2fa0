"""Program that checks the handlers' variables in its environment, before an instance is started with them.

It prints the first error and exits with 1. torchmoor runs it, which imports no handlers.
"""

import os
import sys

from handlers.errors import SettingsError
from handlers.settings.handler import check_variables


def main() -> int:
    try:
        check_variables(os.environ)
    except SettingsError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
