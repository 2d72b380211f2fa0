"""Variables and files of AWS's PyTorch containers that become lines of TorchServe's config.properties."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping

from torchmoor.errors import ConfigError
from torchmoor.wire import headers

logger = logging.getLogger(__name__)

TORCHSERVE_PREFIX = "TS_"
# Keys of TorchServe's config.properties that may be set; torchserve.py has the defaults (render_config). The container
# itself sets addresses, ports, models and tokens.
TORCHSERVE_KEYS: Mapping[str, type] = {
    "allowed_urls": str,
    "default_response_timeout": int,
    "default_startup_timeout": int,
    "default_workers_per_model": int,
    "disable_system_metrics": bool,
    "install_py_dep_per_model": bool,
    "job_queue_size": int,
    "limit_max_image_pixels": bool,
    "max_request_size": int,
    "max_response_size": int,
    "netty_client_threads": int,
    "number_of_netty_threads": int,
    "prefer_direct_buffer": bool,
    "unregister_model_timeout": int,
}
# Values that torchmoor.fleet.torchserve sets in any case, in lower case. AWS's deep learning containers for GPUs set
# TS_DISABLE_SYSTEM_METRICS as well, and images that are built on one inherit it. Its LLaVA sample sets the others.
AS_IT_IS = {
    "disable_system_metrics": "true",
    "disable_token_authorization": "true",
    "header_key_sequence_end": headers.SEQUENCE_END.lower(),
    "header_key_sequence_id": headers.SEQUENCE_ID.lower(),
    "header_key_sequence_start": headers.SEQUENCE_START,
    "metrics_mode": "prometheus",
    "request_sequence_end": headers.SEQUENCE_END.lower(),
    "request_sequence_id": headers.SEQUENCE_ID.lower(),
    "request_sequence_start": headers.SEQUENCE_START,
}
CONFIG_FILE = "TS_CONFIG_FILE"  # read_config_file
MAX_CONFIG_BYTES = 65_536
MAX_NUMBER = 2**31 - 1  # of Java's int
_NUMBER = re.compile(r"\d{1,10}", re.ASCII)
_BLANKS = " \t\f"
_LINE_END = re.compile(r"\r\n?|\n")
_CONTINUED = re.compile(r"(?<!\\)(\\\\)*\\$")  # by the next line
_SEPARATOR = re.compile(r"\s*[=:]\s*|\s+")
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
# Names of AWS's toolkit for the same keys.
TOOLKIT = {
    "SAGEMAKER_MODEL_SERVER_WORKERS": "default_workers_per_model",
    "SAGEMAKER_TS_RESPONSE_TIMEOUT": "default_response_timeout",
}
# A foreign model's own model-config sets its batch size and workers; these variables would have to rewrite it.
UNSERVED = {
    "SAGEMAKER_PROGRAM": "there is no inference.py here: make an archive of the handler with torch-model-archiver",
    "SAGEMAKER_TS_BATCH_SIZE": "set batchSize in the archive's model-config",
    "SAGEMAKER_TS_MAX_BATCH_DELAY": "set maxBatchDelay in the archive's model-config",
    "SAGEMAKER_TS_MIN_WORKERS": "set minWorkers in the archive's model-config",
    "SAGEMAKER_TS_MAX_WORKERS": "set maxWorkers in the archive's model-config",
}


def read_properties(environ: Mapping[str, str]) -> dict[str, str]:
    """Return lines of TorchServe's config.properties. TS_* override the toolkit's names for the same key.

    Raises ConfigError, which names the variable and says what is allowed.
    """
    for name, advice in UNSERVED.items():
        if environ.get(name, "").strip():
            raise ConfigError(f"{name} is set, and has no effect here: {advice}, and leave {name} out")
    found: dict[str, str] = {}
    for name, key in TOOLKIT.items():
        text = environ.get(name, "").strip()
        if text:
            found[key] = _property(name, key, text)
    for name, value in environ.items():
        if name.startswith(TORCHSERVE_PREFIX):
            key = name.removeprefix(TORCHSERVE_PREFIX).lower()
            if name == CONFIG_FILE or AS_IT_IS.get(key) == value.strip().lower():
                continue
            if key not in TORCHSERVE_KEYS:
                known = ", ".join(f"{TORCHSERVE_PREFIX}{each.upper()}" for each in sorted(TORCHSERVE_KEYS))
                raise ConfigError(f"{name} cannot be set here: leave it out; what can be is {known}")
            found[key] = _property(name, key, value.strip())
    return found


def read_config_file(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the supported lines of the config.properties file that TS_CONFIG_FILE names, and log the other lines.

    For an operator's own environment: the file is one of this host. Raises ConfigError.
    """
    path = environ.get(CONFIG_FILE, "").strip()
    if not path:
        return {}
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_CONFIG_BYTES).decode("latin-1")
    except FileNotFoundError:
        logger.warning("%s: there is no %s; TorchServe is configured without it", CONFIG_FILE, path)
        return {}
    except OSError as error:
        raise ConfigError(f"{CONFIG_FILE} must name a readable file: {error}") from error
    given = dict(_read_pairs(text))
    unused = sorted(given.keys() - TORCHSERVE_KEYS.keys())
    if unused:
        logger.warning("%s: %s in %s have no effect: the image sets them itself", CONFIG_FILE, ", ".join(unused), path)
    return {key: _property(f"{key} in {path}", key, text) for key, text in given.items() if key in TORCHSERVE_KEYS}


def _read_pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yield the keys and values of a file in the form of Java's Properties."""
    lines = iter(_LINE_END.split(text))
    for line in lines:
        line = line.lstrip(_BLANKS)
        if not line or line[0] in "#!":
            continue
        while _CONTINUED.search(line):
            line = line[:-1] + next(lines, "").lstrip(_BLANKS)
        key, value = [*_SEPARATOR.split(line, maxsplit=1), ""][:2]
        yield key, _ESCAPED.sub(_unescape, value).strip()


def _unescape(match: re.Match[str]) -> str:
    return chr(int(match[1], 16)) if match[1] else _CONTROLS.get(match[2], match[2])


def _property(name: str, key: str, text: str) -> str:
    if TORCHSERVE_KEYS[key] is int and not (_NUMBER.fullmatch(text) and 0 < int(text) <= MAX_NUMBER):
        raise ConfigError(f"{name} must be a number above 0 and at most {MAX_NUMBER}, not {text[:80]!r}")
    if TORCHSERVE_KEYS[key] is bool and text not in ("true", "false"):
        raise ConfigError(f"{name} must be true or false, not {text!r}")
    if not text or not text.isprintable():
        raise ConfigError(f"{name} must be one line of text, not {text!r}")
    return text
