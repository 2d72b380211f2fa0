"""The image's HEALTHCHECK, which asks the role that runs. It starts every few seconds: standard library only.

It prints each request with its result, which `docker inspect` shows.
"""

from __future__ import annotations

import http.client
import os
import sys

TIMEOUT_S = 2.0


def main() -> int:
    """Return 0 if the role `serve` or `instance` is healthy."""
    port = int(os.environ.get("SAGEMAKER_BIND_TO_PORT", "").strip() or 8080)
    probe_port = int(os.environ.get("TORCHMOOR_SIDE_PORT", "").strip() or 8086)
    return 0 if _is_well(port, "/ping") or _is_well(probe_port, "/live") else 1


def _is_well(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    result: int | Exception
    try:
        connection.request("GET", path)
        result = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        result = error
    finally:
        connection.close()
    print(f"GET http://127.0.0.1:{port}{path}: {result!a}", flush=True)
    return result == 200


if __name__ == "__main__":
    sys.exit(main())
