"""The image's HEALTHCHECK: asks whichever role runs. Standard library only, since it is started every few seconds."""

from __future__ import annotations

import http.client
import os
import sys

TIMEOUT_S = 2.0


def main() -> int:
    """0 if the role `serve` or `instance` says that it is well."""
    port = int(os.environ.get("SAGEMAKER_BIND_TO_PORT") or 8080)
    side_port = int(os.environ.get("TORCHMOOR_SIDE_PORT") or 8086)
    return 0 if _is_well(port, "/ping") or _is_well(side_port, "/live") else 1


def _is_well(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
